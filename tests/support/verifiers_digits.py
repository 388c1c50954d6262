"""Taskset of verifiers with two weighted rewards, and a harness that runs in the process of the episode."""

import httpx
import verifiers.v1 as vf

__all__ = ["Asks", "Digits"]


class Asks(vf.Harness[vf.HarnessConfig]):
    """One request for each task: no program is started, as `null` of verifiers starts one."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=None) as client:
            (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
        return vf.ProgramResult(0, "", "")


class DigitsTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def digits(self, trace) -> float:
        """Share of the answer that is digits."""
        return sum(map(str.isdigit, trace.last_reply)) / max(1, len(trace.last_reply))

    @vf.reward(weight=0.5)
    async def answered(self, trace) -> float:
        return 1.0


class Digits(vf.Taskset[DigitsTask]):
    def load(self):
        for number in range(3):
            yield DigitsTask(vf.TaskData(prompt=f"Tom has {number}"), self.config.task)
