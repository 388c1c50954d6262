"""Groups of episodes that may continue across updates; each turn is sampled by the then current policy.

Between two calls the policy may be updated. Episodes with slow tools or many turns delay no update: their next reply
waits for the end of the update, while their tools keep running.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np

from jaxrlhf.agent_loop.episode_run import EpisodeRun
from jaxrlhf.agent_loop.recorded import Finished
from jaxrlhf.batch import Problem
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round
from jaxrlhf.config import Sampling
from jaxrlhf.engine.rollout_engine import RequestService
from jaxrlhf.serving.sessions import SessionBook

_Key = tuple[int, int]
"""Prompt id and starting step, which identify a group from step to step."""


@dataclass(eq=False)
class _EpisodeGroup:
    """Group of episodes in progress."""

    runs: Sequence[EpisodeRun]
    tasks: Sequence["asyncio.Task[Finished]"]

    @property
    def over(self) -> bool:
        return all(task.done() for task in self.tasks)


class OpenEpisodes:
    """Open groups of episodes, run by an event loop in a background thread.

    Args:
      make: Function that builds the run of a new episode.
      limits: Semaphore of each environment, which limits its open episodes.
      service: Service of the engine that samples the replies during `resume_groups`; the engine's weights may change
        between two calls.
      serve: Context manager that serves agent programs and yields their sessions; their requests wait between two
        calls of `resume_groups`.
    """

    def __init__(
        self,
        make: Callable[..., EpisodeRun],
        limits: Sequence[asyncio.Semaphore],
        service: RequestService,
        serve: Callable[[RequestService], AbstractContextManager[SessionBook | None]],
    ) -> None:
        self._make, self._limits, self._service = make, limits, service
        self._service.hold()
        self._serving = ExitStack()
        self._sessions = self._serving.enter_context(serve(self._service))
        self._groups: dict[_Key, _EpisodeGroup] = {}
        self._round_starts, self._paused = asyncio.Event(), True
        self._changed, self._errors = asyncio.Event(), list[BaseException]()
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._events.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def resume_groups(
        self,
        problems: Sequence[Problem],
        groups: OpenGroups,
        sampling: Sampling,
        until: Round,
        *,
        progress: Callable[[int, int], None],
    ) -> list[Finished]:
        """Continue groups of episodes until enough groups are complete; start groups that are new.

        Args:
          until: End of the round; groups that ended in earlier rounds count as complete.
          progress: Called as episodes end, with the number of finished episodes and the total.

        Returns:
          Episodes of the groups that became complete in this call, in the order of `problems`.

        Raises:
          Diverged: The policy's logits are not finite. All open episodes are dropped.
        """
        asked = self._round(problems, groups, sampling, until, progress)
        future = asyncio.run_coroutine_threadsafe(asked, self._events)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            self.close()
            raise

    def close(self) -> None:
        """Drop all episodes and end the threads."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._drop([*self._groups]), self._events).result()
            self._serving.close()
            self._service.close()
            self._events.call_soon_threadsafe(self._events.stop)
            self._thread.join()
            self._events.close()

    async def _round(
        self,
        problems: Sequence[Problem],
        groups: OpenGroups,
        sampling: Sampling,
        until: Round,
        progress: Callable[[int, int], None],
    ) -> list[Finished]:
        copies, before_P = groups.copies, groups.complete_P
        keys = [(problem.prompt_id, step) for problem, step in zip(problems, groups.started_P.tolist(), strict=True)]
        assert len({*keys}) == len(keys), "a problem is there twice, but its episodes form one group; pass it once"
        open_keys = [key for key, ended in zip(keys, before_P.tolist(), strict=True) if not ended]
        await self._drop([key for key in self._groups if key not in {*open_keys}])
        for problem, key, seed in zip(problems, keys, groups.seed_P.tolist(), strict=True):
            if key in {*open_keys} and key not in self._groups:
                self._groups[key] = self._start(problem, copies, sampling, seed)

        def enough() -> bool:
            over = {key for key, group in self._groups.items() if group.over}
            complete_P = before_P | np.array([key in over for key in keys], bool)
            done = sum(task.done() for group in self._groups.values() for task in group.tasks)
            progress(copies * int(before_P.sum()) + done, copies * len(problems))
            return until.over(complete_P, groups.started_P)

        await asyncio.to_thread(self._service.resume)
        self._each(EpisodeRun.start_clock)
        self._paused = False
        self._round_starts.set()  # wakes the episodes that wait for the round
        self._round_starts.clear()
        try:
            while not enough():
                self._changed.clear()
                await self._changed.wait()
                if self._errors:
                    raise self._errors[0]
        finally:
            self._paused = True
            self._each(EpisodeRun.stop_clock)
            await asyncio.to_thread(self._service.hold)
        ended = [key for key in open_keys if self._groups[key].over]
        return [task.result() for key in ended for task in self._groups.pop(key).tasks]

    def _start(self, problem: Problem, copies: int, sampling: Sampling, seed: int) -> _EpisodeGroup:
        how = {"sampling": sampling, "seed": seed, "service": self._service, "sessions": self._sessions}
        runs = [self._make(problem, problem.prompt_id * copies + copy, **how) for copy in range(copies)]
        tasks = [asyncio.create_task(self._play(run)) for run in runs]
        for task in tasks:
            task.add_done_callback(self._note)
        return _EpisodeGroup(runs, tasks)

    async def _play(self, run: EpisodeRun) -> Finished:
        async with self._limits[run.environment]:
            while self._paused:  # else the episode's time limit would run while the engine is held
                await self._round_starts.wait()
            return await run.play()

    def _note(self, task: "asyncio.Task[Finished]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)
        self._changed.set()

    def _each(self, act: Callable[[EpisodeRun], None]) -> None:
        for group in self._groups.values():
            for run in group.runs:
                act(run)

    async def _drop(self, keys: Sequence[_Key]) -> None:
        """Cancel groups and wait until their tasks have ended."""
        tasks = [task for key in keys for task in self._groups.pop(key).tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
