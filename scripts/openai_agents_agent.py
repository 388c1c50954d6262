"""Agent program that is an agent of a framework, openai-agents, as its documentation shows one.

Needs `jaxrlhf[agents]`. All that it is told of training is an address and a key.
"""

from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from jaxrlhf.environments.calculator import calculator
from jaxrlhf.episode import Session

TOOL = function_tool(calculator)
MOST_TURNS = 3


async def run(session: Session, record: dict[str, Any]) -> float:
    """Have the framework call until it has an answer; 1 if that is `#### answer` of the record."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="sums", tools=[TOOL], model=model)
        quiet = RunConfig(tracing_disabled=True)
        try:
            ended = await Runner.run(agent, record["prompt"], max_turns=MOST_TURNS, run_config=quiet)
        except MaxTurnsExceeded:
            return 0.0
    return float(str(ended.final_output).strip() == f"#### {record['answer']}")
