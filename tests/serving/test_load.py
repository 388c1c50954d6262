"""A server under load: hundreds of clients at once; some leave, some send invalid requests, some have no key."""

import asyncio
import gc
import json
import os
from collections import Counter
from pathlib import Path

import httpx2
import openai
import pytest
from served_models import CONTEXT, TOKEN, served

from jaxrlhf.config.serving import ServingLimits

pytestmark = pytest.mark.slow
REQUESTS = 200


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def leave_in_the_middle(address: str, request: dict) -> None:
    """Ask for a stream and close the connection after its first event."""
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(request).encode()
    headers = ["POST /v1/completions HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {TOKEN}"]
    headers += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    writer.write("\r\n".join(headers).encode() + body)
    await reader.readuntil(b"data:")
    writer.close()
    await writer.wait_closed()


async def ask(client, raw, number: int, expected: dict) -> str:
    """Run one client, whose kind depends on its number; return its result."""
    seed = number % 5
    common = {"model": "tiny", "prompt": f"Tom has {seed}", "max_tokens": 8, "seed": seed}
    kind = number % 10
    if kind == 7:  # leaves in the middle
        await leave_in_the_middle(str(raw.base_url), {**common, "max_tokens": 64, "stream": True})
        return "left"
    if kind == 8:
        body = [b"{", b"[]", b'{"model": 1}', b"\xff" * 100][number // 10 % 4]
        answer = await raw.post("/v1/completions", content=body)
        return f"nonsense {answer.status_code} {'error' in answer.json()}"
    if kind == 9 and number % 20 == 9:
        answer = await raw.post("/v1/completions", json=common, headers={"Authorization": "Bearer no"})
        return f"no key {answer.status_code}"
    if kind == 9:
        try:
            await client.completions.create(**{**common, "prompt": [5] * CONTEXT})
        except openai.BadRequestError as error:
            return f"too long {error.code}"
    streams = number % 2 == 0
    answer = await client.completions.create(**common, stream=streams)
    text = "".join([e.choices[0].text async for e in answer]) if streams else answer.choices[0].text
    return "right" if expected.setdefault(seed, text) == text else "wrong"


async def storm(address: str, expected: dict) -> Counter:
    limits = httpx2.Limits(max_connections=REQUESTS, max_keepalive_connections=0)
    async with (
        httpx2.AsyncClient(limits=limits, timeout=300) as http,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=TOKEN, http_client=http, max_retries=0) as client,
        httpx2.AsyncClient(base_url=address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300) as raw,
    ):
        return Counter(await asyncio.gather(*[ask(client, raw, n, expected) for n in range(REQUESTS)]))


def test_hundreds_of_requests_are_answered_correctly_or_refused(optimized):
    expected: dict[int, str] = {}
    with served(ServingLimits(requests=REQUESTS)) as (server, model):
        rounds, memory, files = [], [], []
        for _ in range(3):
            rounds.append(asyncio.run(storm(server.address, expected)))
            gc.collect()
            memory.append(rss_mib())
            files.append(open_files())
        counts = model.service.counts
        assert counts.requests == counts.completed + counts.cancelled
        assert not model.service.waiting
        assert not model.service.engine.unfinished
    for counted in rounds:
        assert counted == {
            "right": 140,
            "left": 20,
            "nonsense 400 True": 20,
            "no key 401": 10,
            "too long context_length_exceeded": 10,
        }
    assert len(set(expected.values())) > 1
    assert memory[-1] - memory[1] < 16, f"resident MiB after each round: {memory}"
    assert files[-1] <= files[0] + 2, f"open files after each round: {files}"
