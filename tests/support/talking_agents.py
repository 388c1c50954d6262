"""Agent programs that call the policy through OpenAI's client."""

import asyncio
from pathlib import Path


async def asks_twice(session, record):
    """Get two answers in one conversation, then one in another; return the record's score."""
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
    """Get two answers; wait before the second for the file that the record may name."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        for said in ("1", "2"):
            messages = [{"role": "user", "content": said}]
            await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            while said == "1" and record.get("waits_for") and not Path(record["waits_for"]).exists():
                await asyncio.sleep(0.02)
    return 1.0


async def fills(session, record):
    """Continue a conversation until a limit refuses it."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": "1"}]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "2" * 200})
