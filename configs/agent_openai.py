"""GRPO on a program that talks to the policy through OpenAI's client, from random weights.

    pip install 'jaxrlhf[serve]' && python -m jaxrlhf.train --config agent_openai.py

The task is that of `tools_arithmetic.py`. A program (`jaxrlhf/environments/openai_agent.py`) contains the loop of tool
calls. The run answers the program's requests, and trains on the tokens that it sampled for them.

Source: Shao et al. 2024 (arXiv:2402.03300) for GRPO.
"""

from dataclasses import replace

from jaxrlhf.config import Agent, Config, Rewards, load


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(
        load("tools_arithmetic"),
        name="agent_openai",
        environment=Agent(program="jaxrlhf.environments.openai_agent:run", max_turns=3, turn_tokens=24),
        rewards=Rewards(parts=()),
    )
