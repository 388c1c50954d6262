"""Agent program with a ReAct graph of LangGraph and the calculator, written as in the documentation of LangGraph.

    pip install langgraph langchain-openai

The program knows nothing of training except an address and a key. `learning/agents.py` trains its policy.
"""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

from jaxrlhf.environments.calculator import calculator
from jaxrlhf.episode import Session

STEPS = 6
"""Maximum number of graph steps: replies and rounds of tool calls."""


async def run(session: Session, record: dict[str, Any]) -> float:
    """Run the graph until it answers; return 1 if the answer is `#### answer` of the record, else 0."""
    model = ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.api_key, max_retries=0)
    graph = create_react_agent(model, [calculator])
    try:
        ended = await graph.ainvoke({"messages": [("user", record["prompt"])]}, {"recursion_limit": STEPS})
    except GraphRecursionError:
        return 0.0
    return float(ended["messages"][-1].text.strip() == f"#### {record['answer']}")
