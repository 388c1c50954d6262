"""Agent program with a `ToolCallingAgent` of smolagents and the calculator, and demonstrations in its format.

    pip install 'smolagents[openai]'

smolagents repeats a call as text in the next prompt, so each step of an episode is a separate training sequence. The
program knows nothing of training except an address and a key. `learning/agents.py` trains its policy.
"""

import random
from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import AgentError, PromptTemplates

from jaxrlhf.data.generated import products
from jaxrlhf.environments.calculator import calculator
from jaxrlhf.episode import Session

STEPS = 3
TOOL = tool(calculator)
EMPTY = {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""}
TEMPLATES = PromptTemplates(
    system_prompt="",
    planning=EMPTY,
    managed_agent={"task": "", "report": ""},
    final_answer={"pre_messages": "", "post_messages": ""},
)
"""Prompts without instructions for tool calls: a small model with random initial weights learns calls by examples."""


def answer_of(session: Session, prompt: str) -> str:
    """Run the agent; return its final answer, or an empty string if it gives up."""
    asked = {"api_base": session.base_url, "api_key": session.api_key, "client_kwargs": {"max_retries": 0}}
    model = OpenAIModel("policy", tool_choice="auto", **asked)
    agent = ToolCallingAgent([TOOL], model, TEMPLATES, max_steps=STEPS, verbosity_level=0)
    try:
        return str(agent.run(prompt))
    except AgentError:  # the conversation outgrows the context or the limit of turns
        return ""


def run(session: Session, record: dict[str, Any]) -> float:
    """Run an episode; return 1 if the agent's answer is the record's answer, else 0."""
    return float(answer_of(session, record["prompt"]) == record["answer"])


def steps(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return demonstrations of single agent steps: guessed answers, calculator calls, and answers after a call."""
    dice, records = random.Random(f"{seed} {split} steps"), []
    for record in products(split, count, seed, calls=0.5):
        prompt = [{"role": "system", "content": ""}, {"role": "user", "content": f"New task:\n{record['prompt']}"}]
        if isinstance(record["solution"], str):
            said = called("final_answer", answer=record["solution"].removeprefix("#### "))
        else:
            said = record["solution"][0]
            if dice.random() < 2 / 3:
                call = {"id": f"{dice.randrange(16**9):09x}", **said["tool_calls"][0]}
                prompt += [
                    {"role": "assistant", "content": f"Calling tools:\n{[call]}"},
                    {"role": "user", "content": f"Observation:\n{record['answer']}"},
                ]
                said = called("final_answer", answer=record["answer"])
        records.append({"prompt": prompt, "answer": record["answer"], "solution": [said]})
    return records


def called(name: str, **arguments: str) -> dict[str, Any]:
    """Return a message that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
