"""A worker as a role whose verbs are written down, and scores without a reward."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from jaxrlhf.batch import RolloutBatch, Scores
from jaxrlhf.config import KLInLoss


class Called:
    """A worker whose verbs are written down and give futures; updates give gradients and change nothing.

    `gap` is added to the sampler's log-probabilities, so that the gap is more than rounding.
    """

    def __init__(self, worker, calls: list[str], *, gap: float = 0.0) -> None:
        self._worker, self._calls, self._gap, self.gradient = worker, calls, gap, None

    def update_actor(self, minibatches, *, objective, settings):
        [batch] = minibatches
        # The objective reads no KL but its own, so that fewer programs are to be compiled.
        kl = settings.kl if isinstance(settings.kl, KLInLoss) else None
        self.gradient, [sums] = self._worker.gradient(batch, objective, replace(settings, kl=kl, old_logp="auto"))
        self.sums = {name: float(value) for name, value in sums.items()}
        return self._done("update_actor", {})

    def __getattr__(self, verb):
        def call(*args, **kwargs):
            args = [value.result() if isinstance(value, Future) else value for value in args]
            value = getattr(self._worker, verb)(*args, **kwargs)
            if isinstance(value, RolloutBatch):
                logp_BT = value.sampler_logp_BT + self._gap * value.sequences.mask_BT
                value = replace(value, sampler_logp_BT=logp_BT.astype(np.float32))
            return self._done(verb, value)

        return call

    def _done(self, verb, value) -> Future:
        self._calls.append(verb)
        done: Future = Future()
        done.set_result(value)
        return done


class Dice:
    """Scores that have nothing to do with the responses."""

    def compute_reward(self, problems, rollout) -> Scores:
        score_B = np.random.default_rng(7).normal(size=len(rollout.truncated_B)).astype(np.float32)
        return Scores(score_B, np.ones(len(score_B), bool), {})
