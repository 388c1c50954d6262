"""The roles of the paper as workers: actor, critic, reference and reward.

Source: HybridFlow (arXiv:2409.19256), Table 4 of the appendix (model classes and their verbs).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import Array, Experience, Params, Problem, Rollout, Scores, Sequences
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Completion, Engine, Request
from jaxrlhf.models.heads import token_logp, values
from jaxrlhf.parallel import HybridEngine, SwitchError
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.workers.model import Metrics, ModelWorker, Objective, Progress, TrainedWorker
from jaxrlhf.workers.packing import Rows
from jaxrlhf.workers.protocol import DP_PROTO, ONE_TO_ALL, verb


def _policy_output(worker: ModelWorker, params: Params, rows: Rows, temperature: Array) -> TokenOutput:
    hidden_RWD = worker._hidden(params, rows)
    logp, entropy = token_logp(params, worker.config, hidden_RWD, rows.token_RW, temperature=temperature)
    return TokenOutput(logp, entropy)


class Actor(TrainedWorker):
    """The policy: trains in one layout, generates in the other.

    Args:
      engine: Generates on the same mesh.
      hybrid: Switches the weights to the engine's layout and back.
      temperature: Of the rollout; the trained log-probabilities are at this temperature.
    """

    def __init__(self, *args: Any, engine: Engine, hybrid: HybridEngine, temperature: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine, self._hybrid, self._temperature = engine, hybrid, temperature
        self.version = 0
        self._relayout_s = 0.0

    def take_relayout_s(self) -> float:
        """Seconds spent switching layouts since the last call."""
        seconds, self._relayout_s = self._relayout_s, 0.0
        return seconds

    def _output(self, params: Params, rows: Rows, temperature: Array) -> TokenOutput:
        return _policy_output(self, params, rows, temperature)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """The current weights are in the engine within the block."""
        try:
            weights, switch = self._hybrid.to_generation(self.params)
        except SwitchError as error:
            self.params, _ = self._hybrid.to_training(error.weights, self.params)
            raise
        self._relayout_s += switch.seconds
        try:
            self._engine.load(weights, self.version)
            yield
        finally:
            self._engine.unload()
            self.params, switch = self._hybrid.to_training(weights, self.params)
            self._relayout_s += switch.seconds

    @verb(ONE_TO_ALL)
    def compile_generation(self, prompt_lengths: Sequence[int]) -> None:
        """Compile what generating from prompts of these lengths needs, so that no later step has to."""
        with self._generating():
            self._engine.compile_ahead(prompt_lengths)

    @verb(ONE_TO_ALL)
    def generate_sequences(
        self, problems: Sequence[Problem], sampling: Sampling, *, responses_per_prompt: int, seed: int
    ) -> Rollout:
        """Sample responses, prompt-major, under the current policy.

        Args:
          seed: With a response's place in the batch it determines the response.
        """
        requests = [
            Request(request_id=index * responses_per_prompt + copy, prompt_tokens=problem.prompt_tokens, group=index)
            for index, problem in enumerate(problems)
            for copy in range(responses_per_prompt)
        ]
        with self._generating():
            completions = self._engine.generate(
                requests,
                sampling,
                seed=seed,
                progress=lambda done, total: self._progress("generate", done, total),
            )
        prompts = [problem for problem in problems for _ in range(responses_per_prompt)]
        return to_rollout(prompts, completions, width=self._width)

    @verb(DP_PROTO)
    def compute_log_prob(self, rollout: Rollout) -> TokenOutput:
        """log pi and entropy of every token under the current policy, at the rollout's temperature."""
        if stale := set(np.unique(rollout.version_B).tolist()) - {self.version}:
            raise RuntimeError(
                f"the policy is version {self.version} and the rollout holds responses of {sorted(stale)}; "
                f"old log-probabilities have to be taken before the update"
            )
        return self._forward_all(rollout.sequences, temperature=self._temperature)

    @verb(ONE_TO_ALL)
    def update_actor(
        self,
        minibatches: Sequence[Experience],
        *,
        objective: Objective,
        settings: Hashable,
        temperature: float | None = None,
    ) -> Metrics:
        """One update per minibatch. `temperature=None` is the rollout's."""
        scale = self._temperature if temperature is None else temperature
        metrics, first = self.update(minibatches, objective, settings, temperature=scale)
        self.version += len(minibatches)
        # At the first minibatch nothing has moved yet: what is not 0 here is numerics, or a bug.
        return metrics | {"policy/kl_old_first": first["policy/kl_old"]} if "policy/kl_old" in first else metrics


class Critic(TrainedWorker):
    """Estimates the value of every prefix."""

    def _output(self, params: Params, rows: Rows, temperature: Array) -> Array:
        return values(params, self._hidden(params, rows))

    @verb(DP_PROTO)
    def compute_values(self, rollout: Rollout) -> np.ndarray:
        """`value_BT`: of the prefix before each token."""
        return self._forward_all(rollout.sequences)

    @verb(ONE_TO_ALL)
    def update_critic(self, minibatches: Sequence[Experience], *, objective: Objective, settings: Hashable) -> Metrics:
        """One update per minibatch."""
        return self.update(minibatches, objective, settings).metrics


class Reference(ModelWorker):
    """The frozen policy that the actor is kept close to."""

    def __init__(self, *args: Any, temperature: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._temperature = temperature

    def _output(self, params: Params, rows: Rows, temperature: Array) -> TokenOutput:
        return _policy_output(self, params, rows, temperature)

    @verb(DP_PROTO)
    def compute_ref_log_prob(self, rollout: Rollout) -> Array:
        """log pi_ref of every token, at the rollout's temperature."""
        return self._forward_all(rollout.sequences, temperature=self._temperature).logp


class Reward:
    """Scores responses, by functions in a worker pool and by models."""

    def __init__(self, scorer: Scorer, decode: Callable[[Sequence[int]], str], progress: Progress) -> None:
        self.scorer, self._decode, self._progress = scorer, decode, progress

    @verb(ONE_TO_ALL)
    def compute_reward(self, problems: Sequence[Problem], rollout: Rollout) -> Scores:
        """The score of every response."""
        responses = self.responses(rollout)
        copies = len(responses) // len(problems)
        rows = [problem for problem in problems for _ in range(copies)]
        return self.scorer.score(
            [row.prompt for row in rows],
            responses,
            [row.answer for row in rows],
            [row.record for row in rows],
            finished=(~np.asarray(rollout.truncated_B)).tolist(),
            progress=lambda done, total: self._progress("reward", done, total),
        )

    def responses(self, rollout: Rollout) -> list[str]:
        """The responses as text, without special tokens."""
        tokens, mask = rollout.sequences.token_BT, rollout.sequences.mask_BT
        return [self._decode([int(t) for t in row[chosen]]) for row, chosen in zip(tokens, mask, strict=True)]


def to_rollout(prompts: Sequence[Problem], completions: Sequence[Completion], *, width: int) -> Rollout:
    """Completions as left-aligned arrays of `width` columns."""
    count = len(completions)
    token_BT, mask_BT = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    logp_BT = np.zeros((count, width), np.float32)
    length_B = np.zeros(count, np.int32)
    for row, (problem, completion) in enumerate(zip(prompts, completions, strict=True)):
        start = len(problem.prompt_tokens)
        end = start + len(completion.tokens)
        token_BT[row, :start], token_BT[row, start:end] = problem.prompt_tokens, completion.tokens
        logp_BT[row, start:end] = completion.logps
        mask_BT[row, start:end] = True
        length_B[row] = end
    return Rollout(
        sequences=Sequences(token_BT, length_B, mask_BT, np.array([p.prompt_id for p in prompts], np.int64)),
        sampler_logp_BT=logp_BT,
        truncated_B=np.array([c.truncated for c in completions]),
        version_B=np.array([c.version for c in completions], np.int32),
    )
