"""Sampler: an engine on a process's part of a generation mesh, whose completions become rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrlhf.agent_loop import AgentLoop
from jaxrlhf.batch import KEPT, Problem, RolloutBatch
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round, append
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import Completion, Engine, Request
from jaxrlhf.engine.rollout_engine import PolicyWeights, RolloutEngine
from jaxrlhf.engine.servers.server_engine import ServerEngine
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.lora.lora import adapted
from jaxrlhf.sharding.submesh import hand_over
from jaxrlhf.workers.generation.rollouts import continued_request, requests_of, to_rollout
from jaxrlhf.workers.model import Progress

CompletionListener = Callable[[Problem, Completion], None]
"""Listener called with each completed response and its problem."""


@dataclass
class CompletionFeed:
    """Connection from the samplers of a process to its reward worker.

    Attributes:
      listen: Function called at the start of a rollout, which returns the listener for its responses; None without a
        reward worker.
    """

    listen: Callable[[], CompletionListener] | None = None


@dataclass(frozen=True)
class Sampler:
    """Engine on this process's part of a generation mesh.

    Attributes:
      mesh: The whole generation mesh.
      submesh: This process's part of the mesh; its replicas need no other process.
      width: T, number of columns of a rollout's arrays.
      agent_loop: Runner of episodes; None without an environment.
      most_kept: Largest sampling mask of a training rollout, which the engine records; 0 records none.
      new_engine: Function from another model and a number of slots to a further engine on the same devices.
    """

    config: AnyModel
    engine: RolloutEngine
    mesh: Mesh
    submesh: Mesh
    width: int
    progress: Progress
    feed: CompletionFeed
    agent_loop: AgentLoop | None = None
    most_kept: int = 0
    new_engine: Callable[[AnyModel, int], Engine] | None = None

    def take_metrics(self) -> dict[str, float]:
        """Return the worth of drafts or the cost of servers' reloads since the last call; empty if there were none."""
        if isinstance(self.engine, ServerEngine):
            return self.engine.take_metrics()
        if not isinstance(self.engine, Engine):
            return {}
        counts = self.engine.speculation.take_counts()
        if not counts.calls:
            return {}
        return {
            "speculation/accepted_fraction": counts.accepted / max(counts.drafted, 1),
            "speculation/tokens_per_pass": counts.tokens / counts.rows,
        }

    def compile_ahead(self, prompt_lengths: Sequence[int]) -> None:
        """Compile every program that generation from prompts of these lengths needs."""
        self.engine.compile_ahead(prompt_lengths)

    def load(self, weights: Any, version: int, *, donated: Any) -> None:
        """Set the engine's weights from weights in the generation layout over the whole mesh.

        Args:
          weights: `parameters`, and `adapters` if there are any. Adapters are applied separately, not merged: added to
            low-precision weights, small changes would be rounded away.
          donated: Tree of bools for `Engine.load`, True for weights that nobody else reads; ignored with adapters.
        """
        here = hand_over(weights, self.submesh)
        given = PolicyWeights(self.config, here["parameters"], version, donated["parameters"])
        if "adapters" in here:
            given = PolicyWeights(self.config, adapted(here["parameters"], here["adapters"]), version)
        self.engine.update_weights(given)

    def generate(
        self, problems: Sequence[Problem], sampling: Sampling, *, responses_per_prompt: int, seed: int
    ) -> RolloutBatch:
        """Sample responses or, with an environment, run episodes; see `GenerationWorker.generate_sequences`."""
        if self.agent_loop is not None:
            sizes, progress = {"copies": responses_per_prompt, "width": self.width}, partial(self.progress, "episodes")
            return self.agent_loop.run(self.engine, problems, sampling, seed=seed, progress=progress, **sizes)
        requests, prompts = requests_of(problems, responses_per_prompt)
        completions = self.engine.generate(
            requests,
            sampling,
            seed=seed,
            progress=partial(self.progress, "generate"),
            on_completion=self._listener(requests, prompts),
        )
        rollout = to_rollout(prompts, completions, width=self.width)
        if 0 < sampling.most_kept <= self.most_kept and problems and KEPT not in rollout.sequences.recorded:
            raise RuntimeError(
                f"{type(self.engine).__name__} sampled with {sampling} and did not record the candidates "
                "(Completion.recorded), so log-probabilities of the same distribution are unknown; record them in the "
                "engine, or sample with temperature only"
            )
        return rollout

    def continue_groups(
        self, problems: Sequence[Problem], groups: OpenGroups, sampling: Sampling, until: Round
    ) -> OpenGroups:
        """Continue groups, the oldest first, until enough are complete; see `GenerationWorker.continue_groups`."""
        end, engine = until.share(len(problems)), self.engine
        if not isinstance(engine, Engine):
            raise Refusal(
                f"rollout.over_provision continues responses with later weights, which {type(engine).__name__} "
                "does not support; set rollout.over_provision=1, or generate with the built-in engine"
            )
        if self.agent_loop is not None:
            how: dict[str, Any] = {"width": self.width, "progress": partial(self.progress, "episodes")}
            arrived = self.agent_loop.resume_groups(engine, problems, groups, sampling, end, **how)
            ids = [problem.prompt_id for problem in problems]
            arrived_B = np.repeat(np.isin(ids, arrived.sequences.prompt_id_B), groups.copies)
            return replace(groups, ended_B=groups.ended_B | arrived_B, rollout=arrived)
        return self._continue_responses(engine, problems, groups, sampling, end)

    def _continue_responses(
        self, engine: Engine, problems: Sequence[Problem], groups: OpenGroups, sampling: Sampling, end: Round
    ) -> OpenGroups:
        assert engine.weights is not None, "no weights are loaded"
        copies, version = groups.copies, engine.weights.version
        rollout: RolloutBatch = jax.tree.map(np.array, groups.rollout)
        started_P, ended_B = groups.started_P, groups.ended_B.copy()
        open_rows = np.flatnonzero(~ended_B).tolist()
        open_rows.sort(key=lambda row: started_P[row // copies])
        states, row_of = {}, {}
        for row in open_rows:
            request = continued_request(problems[row // copies], rollout, row, copy=row % copies, copies=copies)
            states[row] = engine.new_sequence(request, sampling, seed=int(groups.seed_P[row // copies]))
            row_of[request.request_id] = row
        try:
            for state in states.values():
                engine.enqueue(state)
            while not end.over(replace(groups, ended_B=ended_B).complete_P, started_P):
                for completion in engine.step():
                    row = row_of[completion.request_id]
                    ended_B[row], rollout.truncated_B[row] = True, completion.truncated
                self.progress("generate", int(ended_B.sum()), len(ended_B))
        finally:
            engine.free()
        for row, state in states.items():
            columns = append(rollout, row, state.tokens, state.logps, version=version)
            if state.kept:
                kept_BTK: Any = rollout.sequences.recorded[KEPT]
                kept_BTK[row, columns] = np.concatenate(state.kept)[: len(state.tokens)]
        return replace(groups, rollout=rollout, ended_B=ended_B)

    def _listener(
        self, requests: Sequence[Request], problems: Sequence[Problem]
    ) -> Callable[[Completion], None] | None:
        if self.feed.listen is None:
            return None
        listener = self.feed.listen()
        problem_of = {request.request_id: problem for request, problem in zip(requests, problems, strict=True)}
        return lambda completion: listener(problem_of[completion.request_id], completion)
