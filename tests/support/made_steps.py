"""Roles that play back made-up responses, so that a step can be told by arithmetic, without a model."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from jaxrlhf.batch import EpisodeRows, Problem, RolloutBatch, Scores, Sequences
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import Algorithm, Arithmetic, Config, FromScratch, Rollout, Sampling, checked, function_of
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import StepInput, StepResult
from jaxrlhf.episode import EpisodeRecord, StopCause


def done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def problem(number: int) -> Problem:
    return Problem(prompt_id=number, prompt=f"prompt {number}", prompt_tokens=(1,))


def rollout_of(mask_BT: np.ndarray, prompt_id_B: Sequence[int], *, truncated_B=None) -> RolloutBatch:
    """Responses with these masks; the first token of each row is the row's number."""
    mask_BT = np.asarray(mask_BT, bool)
    count, width = mask_BT.shape
    token_BT = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, width))
    sequences = Sequences(token_BT, np.full(count, width, np.int32), mask_BT, np.asarray(prompt_id_B, np.int64))
    logp_BT = np.where(mask_BT, -1.0, 0.0).astype(np.float32)
    cut_B = np.zeros(count, bool) if truncated_B is None else np.asarray(truncated_B)
    return RolloutBatch(sequences, logp_BT, cut_B, np.zeros(mask_BT.shape, np.int32))


def episode_records(*stops: StopCause) -> np.ndarray:
    """Records of episodes without turns that ended so."""
    record_B = np.empty(len(stops), object)
    record_B[:] = [EpisodeRecord([], [], stop) for stop in stops]
    return record_B


def episodes_of(turn_BT: np.ndarray, paid_BT: np.ndarray, *, anchor_BT=None, record_B=None) -> EpisodeRows:
    """Episodes of one row each, by default without anchors, and with records that ended by themselves."""
    count, turn_BT = len(turn_BT), np.asarray(turn_BT, np.int16)
    anchor_BT = np.full(turn_BT.shape, -1) if anchor_BT is None else anchor_BT
    record_B = episode_records(*["done"] * count) if record_B is None else record_B
    return EpisodeRows(np.arange(count), turn_BT, np.asarray(paid_BT, np.float32), anchor_BT, record_B)


@dataclass
class Made:
    """Actor and reward of a made-up step.

    Attributes:
      generate: From problems and copies to a rollout.
      score: From a rollout to its scores, NaN where there is none.
      other_roles: Other roles that the step calls, by name.
      collected: What the last step learnt from.
    """

    generate: Callable[[Sequence[Problem], int], RolloutBatch]
    score: Callable[[RolloutBatch], Sequence[float]]
    asked: list[tuple[tuple[int, ...], Sampling, int]] = field(default_factory=list)
    minibatches: list[Experience] = field(default_factory=list)
    other_roles: dict[str, object] = field(default_factory=dict)
    collected: ScoredRollout | None = None

    def generate_sequences(self, problems, sampling, *, responses_per_prompt, seed) -> Future:
        self.asked.append((tuple(one.prompt_id for one in problems), sampling, responses_per_prompt))
        return done(self.generate(problems, responses_per_prompt))

    def compute_reward(self, problems, rollout) -> Future:
        rollout = rollout.result() if isinstance(rollout, Future) else rollout
        score_B = np.asarray(self.score(rollout), np.float32)
        known_B = np.isfinite(score_B)
        return done(Scores(np.where(known_B, score_B, 0).astype(np.float32), known_B, {"made": score_B}))

    def compute_log_prob(self, rollout) -> Future:
        rollout = rollout.result() if isinstance(rollout, Future) else rollout
        return done(rollout.sampler_logp_BT)

    def update_actor(self, minibatches, *, objective, settings) -> Future:
        self.minibatches += minibatches
        return done({})

    def step(self, algorithm: Algorithm, *, prompts: int, copies: int, more: Sequence[int] = (), **settings):
        """One step of an algorithm on problems 0, 1, ...; `more` are the ids that are sampled after them."""
        rollout = Rollout(prompts_per_step=prompts, responses_per_prompt=copies, **settings)
        config = checked(Config("made", algorithm, steps=1, model=FromScratch(), data=Arithmetic(), rollout=rollout))
        left = [problem(number) for number in more]

        def draw() -> list[Problem]:
            return [left.pop(0) for _ in range(prompts)]

        roles = SimpleNamespace(actor=self, reward=self, **self.other_roles)  # whoever calls another fails
        work = StepInput(config, [problem(number) for number in range(prompts)], 0, algorithm.initial_state(), draw)
        self.collected = function_of(algorithm, "collect")(roles, work)
        result: StepResult = function_of(algorithm, "learn")(roles, work, self.collected)
        return result, len(left)

    def rows(self, name: str) -> np.ndarray:
        """A field of the minibatches, `weight` or `mask`, in the order in which rows were generated."""
        values = {"weight": lambda e: e.weight_BT, "mask": lambda e: e.sequences.mask_BT}
        get = values.get(name, lambda e: e.fields[name])
        found = np.concatenate([np.asarray(get(batch)) for batch in self.minibatches])
        return found[np.argsort(np.concatenate([batch.sequences.token_BT[:, 0] for batch in self.minibatches]))]
