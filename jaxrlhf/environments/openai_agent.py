"""Example agent program: calls the policy and the calculator through OpenAI's client, as external programs do."""

import json
from typing import Any

from openai import AsyncOpenAI

from jaxrlhf.environments.calculator import calculator
from jaxrlhf.episode import Session

MOST_CALLS = 3

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": 'Such as "47*86".'}},
            "required": ["expression"],
        },
    },
}


async def run(session: Session, record: dict[str, Any]) -> float:
    """Call the policy until it answers without a tool call; return 1 for `#### <the record's answer>`, else 0."""
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": record["prompt"]}]
        for _ in range(MOST_CALLS):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[SCHEMA])  # type: ignore[list-item]
            message = answer.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == f"#### {record['answer']}")
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(**arguments)})
    return 0.0
