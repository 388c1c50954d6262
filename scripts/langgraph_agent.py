"""Agent program that is a ReAct graph of LangGraph with the calculator, as its documentation shows one.

    pip install langgraph langchain-openai

All that it is told of training is an address and a key. `agents_learning.py` trains it.
"""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

from jaxrlhf.environments.calculator import calculator
from jaxrlhf.episode import Session

STEPS = 6
"""Steps of a graph, at most: replies and rounds of calls."""


async def run(session: Session, record: dict[str, Any]) -> float:
    """Have the graph call until it has an answer; 1 if that is `#### answer` of the record."""
    model = ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.api_key, max_retries=0)
    graph = create_react_agent(model, [calculator])
    try:
        ended = await graph.ainvoke({"messages": [("user", record["prompt"])]}, {"recursion_limit": STEPS})
    except GraphRecursionError:
        return 0.0
    return float(ended["messages"][-1].text.strip() == f"#### {record['answer']}")
