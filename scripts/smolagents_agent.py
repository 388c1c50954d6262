"""Agent program that is a `ToolCallingAgent` of smolagents with the calculator, and demonstrations in its form.

    pip install 'smolagents[openai]'

smolagents writes a call again as text in the next prompt, so an episode is a sequence a step. All that it is told of
training is an address and a key. `agents_learning.py` trains it.
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
"""No explanations of how to call tools: a small model that begins from random weights learns that by examples."""


def answer_of(session: Session, prompt: str) -> str:
    """Final answer of an agent; none if it gives up."""
    asked = {"api_base": session.base_url, "api_key": session.api_key, "client_kwargs": {"max_retries": 0}}
    model = OpenAIModel("policy", tool_choice="auto", **asked)
    agent = ToolCallingAgent([TOOL], model, TEMPLATES, max_steps=STEPS, verbosity_level=0)
    try:
        return str(agent.run(prompt))
    except AgentError:  # of a conversation that outgrows the context, or beyond the limit of turns
        return ""


def run(session: Session, record: dict[str, Any]) -> float:
    """Score of an episode: 1 if the agent's answer is the record's, else 0."""
    return float(answer_of(session, record["prompt"]) == record["answer"])


def steps(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Steps of an agent as smolagents asks for them: guesses, calls, and answers to what the calculator said."""
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
    """A message that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
