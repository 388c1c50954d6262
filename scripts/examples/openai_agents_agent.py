"""Agent program with an agent of the framework openai-agents, written as in the documentation of openai-agents.

Needs `jaxrlhf[agents]`. The program knows nothing of training except an address and a key.
"""

from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from jaxrlhf.environments.calculator import calculator
from jaxrlhf.episode import Session

TOOL = function_tool(calculator)
MOST_TURNS = 3


async def run(session: Session, record: dict[str, Any]) -> float:
    """Run the agent until it answers; return 1 if the answer is `#### answer` of the record, else 0."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="sums", tools=[TOOL], model=model)
        quiet = RunConfig(tracing_disabled=True)
        try:
            ended = await Runner.run(agent, record["prompt"], max_turns=MOST_TURNS, run_config=quiet)
        except MaxTurnsExceeded:
            return 0.0
    return float(str(ended.final_output).strip() == f"#### {record['answer']}")
