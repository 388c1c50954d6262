"""Benchmark of the controller's own work in a GRPO step, without a model. Prints one JSON line.

    JAX_PLATFORMS=cpu python -m scripts.benchmarks.host --prompts 1024 --responses 8 --tokens 2048 [--hosts 4]

Responses have log-normal lengths (median 400 tokens), so that most of the padded arrays is padding, as in a run.
`prepare_s` are the seconds of rewards, advantages, metrics and token weights. `ship_s` and `shipped_bytes` are seconds
and bytes of pickling the arguments of the actor's update for all hosts. `cut_s` are the seconds of building every
minibatch, as a single process does. All figures are medians of the steps after the first.
"""

import argparse
import json
import pickle
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrlhf.batch import Problem, RolloutBatch, Scores, Sequences
from jaxrlhf.batching.ragged import MinibatchRows
from jaxrlhf.config import GRPO, load
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.grpo import grpo
from jaxrlhf.dataflows.step import StepInput

PROMPT_TOKENS = 256


def rollout_of(prompts: int, responses: int, tokens: int) -> RolloutBatch:
    """Return a rollout of random responses, `responses` to each prompt."""
    draw, count = np.random.default_rng(0), prompts * responses
    prompt_B = np.repeat(draw.integers(40, PROMPT_TOKENS, prompts), responses)
    drawn_B = np.minimum(draw.lognormal(6.0, 0.8, count).astype(np.int32) + 1, tokens - PROMPT_TOKENS)
    length_B, place_T = (prompt_B + drawn_B).astype(np.int32), np.arange(tokens)
    inside_BT = place_T < length_B[:, None]
    mask_BT = inside_BT & (place_T >= prompt_B[:, None])
    token_BT = np.where(inside_BT, draw.integers(1, 1000, inside_BT.shape, dtype=np.int32), 0)
    logp_BT = np.where(mask_BT, -draw.random(mask_BT.shape, np.float32), np.float32(0))
    sequences = Sequences(token_BT, length_B, mask_BT, np.repeat(np.arange(prompts), responses))
    return RolloutBatch(sequences, logp_BT, np.zeros(count, bool), np.zeros(mask_BT.shape, np.int32))


class Actor:
    """Stand-in for the actor that returns given log-probabilities and measures the minibatches that it receives."""

    def __init__(self, rollout: RolloutBatch, hosts: int) -> None:
        self._rollout, self._hosts = rollout, hosts
        self.measured: dict[str, float] = {}

    def compute_log_prob(self, rollout: RolloutBatch) -> Any:
        """Return old log-probabilities; they also serve as the reference's."""
        return rollout.sampler_logp_BT

    compute_ref_log_prob = compute_log_prob

    def update_actor(self, minibatches: MinibatchRows, **_: Any) -> dict[str, float]:
        """Pickle the minibatches for every host, then build them."""
        start = time.perf_counter()
        shipped = [len(pickle.dumps(minibatches.part(host, self._hosts))) for host in range(self._hosts)]
        ship_s = time.perf_counter() - start
        trained = sum(int(np.count_nonzero(minibatch.weight_BT)) for minibatch in minibatches)
        cut_s = time.perf_counter() - start - ship_s
        self.measured = {"shipped_bytes": sum(shipped), "ship_s": ship_s, "cut_s": cut_s, "trained_tokens": trained}
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 1024), ("responses", 8), ("tokens", 2048), ("hosts", 4), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    count = given.prompts * given.responses
    config = load("grpo_arithmetic")
    settings = config.algorithm
    assert isinstance(settings, GRPO)
    rollout_settings = replace(
        config.rollout,
        prompts_per_step=given.prompts,
        responses_per_prompt=given.responses,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=given.tokens - PROMPT_TOKENS,
    )
    algorithm = replace(settings, responses_per_update=count // 8, epochs_per_step=2)
    config = replace(config, rollout=rollout_settings, algorithm=algorithm)
    rollout = rollout_of(given.prompts, given.responses, given.tokens)
    actor = Actor(rollout, given.hosts)
    roles: Any = SimpleNamespace(actor=actor, reference=actor)
    problems = [Problem(index, "", (1,)) for index in range(given.prompts)]
    score_B = np.random.default_rng(1).integers(0, 2, count).astype(np.float32)
    batch = ScoredRollout(problems, rollout, Scores(score_B, np.ones(count, bool), {}))
    steps = []
    for index in range(given.steps):
        start = time.perf_counter()
        grpo(roles, StepInput(config, problems, index, {"kl_coefficient": 0.0}), batch)
        whole_s = time.perf_counter() - start
        prepare_s = whole_s - actor.measured["ship_s"] - actor.measured["cut_s"]
        steps.append({"prepare_s": prepare_s, **actor.measured, "step_s": whole_s})
    print(json.dumps({name: median(step[name] for step in steps[1:]) for name in steps[0]}))


if __name__ == "__main__":
    main()
