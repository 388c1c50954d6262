"""Benchmark of training passes on packed sequences: an update of the actor, a forward pass. Prints one JSON line.

    python -m scripts.benchmarks.update --preset small --sequences 64 --tokens 192 [--trained 128] [--responses 8]

`update_flops_per_s` counts the operations that the mathematics needs for real tokens: products with weights, causal
attention, and the head on trained tokens. An update counts three forward passes. Recomputation and padding do not
count.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import jax
import numpy as np

from jaxrlhf.algos import policy_objective
from jaxrlhf.batch import Array, RolloutBatch, Sequences
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import Config, Remat
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.workers.build import Phase
from scripts.benchmarks import workload as bench
from scripts.benchmarks.step import config_of


def sequences_of(count: int, length: int, trained: int, vocab: int, responses: int) -> Sequences:
    """Return random sequences whose last tokens are trained; `responses` consecutive sequences share a prompt."""
    draw = np.random.default_rng(0)
    mask_BT = np.broadcast_to(np.arange(length) >= length - trained, (count, length))
    token_BT = draw.integers(2, vocab, (count, length), dtype=np.int32)
    prompt_id_B = np.arange(count) // responses
    token_BT = np.where(mask_BT, token_BT, token_BT[prompt_id_B * responses])
    return Sequences(token_BT, np.full(count, length, np.int32), mask_BT, prompt_id_B)


def seconds(call: Any, repeats: int) -> float:
    """Return the median of the calls after the first call, which compiles; the first call's if there is no other."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times[1:] or times)


def measure(workload: bench.Workload, config: Config, *, repeats: int) -> dict[str, Any]:
    """Measure an update over the workload's sequences, and a forward pass unless `repeats` is 0."""
    preset = bench.PRESETS[workload.preset]
    length = workload.prompt_tokens + workload.new_tokens
    sequences = sequences_of(workload.sequences, length, workload.new_tokens, preset.vocab, workload.responses)
    shape, draw = sequences.token_BT.shape, np.random.default_rng(1)
    fields: dict[str, Array]
    fields = {name: draw.normal(-9, 0.1, shape).astype(np.float32) for name in ("old_logp", "ref_logp")}
    fields |= {"advantage": draw.normal(size=shape).astype(np.float32), "kl_weight": np.full(shape, 1e-5, np.float32)}
    weight_BT = np.where(sequences.mask_BT, 1 / sequences.mask_BT.sum(), 0).astype(np.float32)
    experience = [Experience.of(sequences, weight_BT, fields)]
    pools = launch(config, bench.tokenizer(preset, outside=False), progress=lambda *_: None, workdir=None)
    roles = pools.roles(Phase(config, ("actor",), 100))
    nothing_B, zero_BT = np.zeros(shape[0], bool), np.zeros(shape, np.int32)
    rollout = RolloutBatch(sequences, np.zeros(shape, np.float32), nothing_B, zero_BT)

    def update() -> None:
        settings = config.algorithm
        roles.actor.update_actor(experience, objective=policy_objective, settings=settings).result()

    def forward() -> None:
        roles.actor.compute_log_prob(rollout).result()

    forward_s = seconds(forward, repeats) if repeats else None
    update_s = seconds(update, repeats)
    roles.close()
    pools.close()
    flops = bench.forward_flops(preset, workload.sequences, length, workload.new_tokens)
    passed = forward_s and {"forward_s": round(forward_s, 4), "forward_flops_per_s": round(flops / forward_s)}
    return {
        "tokens": workload.sequences * length,
        "update_s": round(update_s, 4),
        "update_flops_per_s": round(3 * flops / update_s),
        **(passed or {}),
        "tokens_per_s": round(workload.sequences * length / update_s, 1),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=bench.PRESETS, default="small")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192, help="tokens of a sequence")
    parser.add_argument("--trained", type=int, default=128, help="trained tokens, at the end of a sequence")
    parser.add_argument("--responses", type=int, default=1, help="sequences that share a prompt")
    parser.add_argument("--tokens-per-microbatch", type=int, default=2304)
    parser.add_argument("--remat", choices=get_args(Remat), default="auto", help="as Training.remat")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls after the first; 0 times the first")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    flags = parser.parse_args()
    prompts, prompt_tokens = flags.sequences // flags.responses, flags.tokens - flags.trained
    workload = bench.Workload(flags.preset, prompts, flags.responses, prompt_tokens, flags.trained)
    model = bench.checkpoint(flags.preset, flags.models)
    settings = {"tokens_per_microbatch": flags.tokens_per_microbatch, "remat": flags.remat}
    # GRPO requires groups in its configuration; the sequences measured here may still have one response to a prompt.
    config = config_of(replace(workload, responses=max(2, flags.responses)), model, steps=1, **settings)
    with bench.Memory() as memory:
        figures = measure(workload, config, repeats=flags.repeats)
    device = jax.devices()[0].device_kind
    print(
        json.dumps(
            {
                "bench": "update",
                **vars(flags),
                "models": str(flags.models),
                **figures,
                "peak_rss_mb": round(memory.peak_mb),
                "device": device,
            }
        )
    )


if __name__ == "__main__":
    main()
