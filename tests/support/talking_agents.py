"""Agent programs that ask the policy through OpenAI's client."""

import asyncio
from pathlib import Path


async def asks_twice(session, record):
    """A conversation of two answers, then another one; scores by the record."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": str(record["number"])}]
        for said in ("12", None):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            if said:
                messages.append({"role": "user", "content": said})
        other = [{"role": "user", "content": "34"}]
        await client.chat.completions.create(model="policy", messages=other, max_tokens=5)
    return record["number"] / 10


async def never_asks(session, record):
    return 0.5


async def hangs(session, record):
    await asyncio.sleep(60)


def raises(session, record):
    raise ValueError("no agent today")


async def pauses(session, record):
    """Two answers; before the second it waits until there is a file, if its record names one."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        for said in ("1", "2"):
            messages = [{"role": "user", "content": said}]
            await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            while said == "1" and record.get("waits_for") and not Path(record["waits_for"]).exists():
                await asyncio.sleep(0.02)
    return 1.0


async def fills(session, record):
    """A conversation that goes on until there is no room for it."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": "1"}]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "2" * 200})
