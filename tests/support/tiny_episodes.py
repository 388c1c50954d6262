"""A tiny run in episodes: also a configuration file.

python -m jaxrlhf.train --config tests/support/tiny_episodes.py
"""

from dataclasses import replace

import tiny_runs

from jaxrlhf.config import Config, Environment, Generated, Rewards, Rollout


def conversations(split: str, count: int, seed: int) -> list[dict]:
    """Records that `Talks` continues, with pauses that differ."""
    return [{"prompt": str(number), "turns": 3, "pause_s": 0.01 * (number % 3)} for number in range(count)]


def get_config() -> Config:
    """PPO over conversations of three turns, paid by their environment."""
    config = tiny_runs.get_config()
    return replace(
        config,
        name="tiny_episodes",
        data=Generated("tiny_episodes:conversations", train_problems=64, eval_problems=8),
        environment=Environment(
            factory="talking_environments:Talks", turn_tokens=4, cut_turns="close", observation_tokens=8, max_turns=5
        ),
        rewards=Rewards(parts=()),
        cold_start=None,
        rollout=Rollout(prompts_per_step=8, responses_per_prompt=2, max_prompt_tokens=16, max_response_tokens=48),
        steps=4,
    )
