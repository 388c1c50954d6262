"""Benchmark of how much the critic and the reference overlap when each has its own pool.

    python -m scripts.benchmarks.overlap --cluster ray [--json FILE] [--trace overlap_trace.json]

Each role scores one batch alone, then both roles score the batch at once, several times. With `--cluster ray` each pool
is a process with one CPU thread, so that one role alone leaves a core idle. The command then fails if both roles
together take 0.75 or more of the sum of their times alone. The trace of the last round opens in Perfetto. Without
`--cluster ray` both pools are devices of this process. CPU programs of one process share all cores, so the overlap
depends on the number of cores and is only reported.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

# Set before JAX starts. Hosts inherit the variable; one thread is enough for hosts without collectives.
os.environ["NPROC"] = "1" if any(word.endswith("ray") for word in sys.argv) else os.environ.get("NPROC", "32")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxrlhf.batch import RolloutBatch, Sequences
from jaxrlhf.config import PPO, Arithmetic, Config, FromScratch, KLInReward, Pool, RayCluster, Rollout, Training
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.single_controller.pools import Roles
from jaxrlhf.tracking import TimelineFile
from jaxrlhf.workers.build import Phase
from scripts.benchmarks import workload as bench

RESPONSES, WIDTH = 32, 128
LIMIT = 0.75


def configuration(*, ray: bool) -> Config:
    """Return a configuration with a critic and a reference of equal size, on one device each."""
    training = Training(tokens_per_microbatch=1024, remat="none")
    return Config(
        name="overlap",
        model=FromScratch(hidden_size=256, intermediate_size=1024, num_layers=6, num_heads=4, num_kv_heads=4),
        data=Arithmetic(),
        algorithm=PPO(kl=KLInReward(), critic=training, responses_per_update=RESPONSES),
        actor=training,
        rollout=Rollout(prompts_per_step=RESPONSES, max_prompt_tokens=WIDTH // 2, max_response_tokens=WIDTH // 2),
        steps=1,
        pools=(Pool("first", 1, ("actor", "critic")), Pool("second", 1, ("reference", "reward"))),
        cluster=RayCluster() if ray else None,
    )


def batch(vocabulary: int) -> RolloutBatch:
    """Return a batch of random tokens."""
    token_BT = np.random.default_rng(0).integers(0, vocabulary, (RESPONSES, WIDTH)).astype(np.int32)
    mask_BT = np.broadcast_to(np.arange(WIDTH) >= WIDTH // 2, token_BT.shape)
    sequences = Sequences(token_BT, np.full(RESPONSES, WIDTH, np.int32), mask_BT, np.arange(RESPONSES))
    nothing_B, zero_BT = np.zeros(RESPONSES, bool), np.zeros_like(token_BT)
    return RolloutBatch(sequences, zero_BT.astype(np.float32), nothing_B, zero_BT)


def seconds(roles: Roles, rollout: RolloutBatch, *, critic: bool, reference: bool) -> float:
    """Return the seconds of one call of each chosen role, from the first call until all calls are done."""
    start = time.perf_counter()
    calls = [roles.critic.compute_values(rollout)] if critic else []
    calls += [roles.reference.compute_ref_log_prob(rollout)] if reference else []
    wait(calls)  # without fetching the results
    return time.perf_counter() - start


def measure(roles: Roles, rollout: RolloutBatch, *, rounds: int, trace: Path) -> dict[str, float]:
    """Return medians over rounds; a round measures alone and together in turn, so that noise affects all equally."""
    alone = {"critic": {"critic": True, "reference": False}, "reference": {"critic": False, "reference": True}}
    ways = alone | {"together": {"critic": True, "reference": True}}
    for chosen in ways.values():
        seconds(roles, rollout, **chosen)  # compiles
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        roles.timeline.take()
        for name, chosen in ways.items():
            times[name].append(seconds(roles, rollout, **chosen))
    trace.unlink(missing_ok=True)
    file = TimelineFile(trace)
    file.append(roles.timeline.take())
    file.close()
    taken = {f"{name}_s": round(median(values), 4) for name, values in times.items()}
    ratios = [t / (c + r) for c, r, t in zip(times["critic"], times["reference"], times["together"], strict=True)]
    return taken | {"together_over_sum": round(median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the overlap of two pools.")
    parser.add_argument("--cluster", choices=["ray"], help="each pool a process of its own, started by Ray")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--trace", type=Path, default=Path("overlap_trace.json"))
    flags = parser.parse_args()
    config = configuration(ray=flags.cluster == "ray")
    tokenizer = embedded_tokenizer()
    stage = Phase(config, ("critic", "reference"), total_updates=1)
    with (
        closing(launch(config, tokenizer, progress=lambda *_: None, workdir=None)) as pools,
        closing(pools.roles(stage)) as roles,
    ):
        figures = measure(roles, batch(len(tokenizer)), rounds=flags.rounds, trace=flags.trace)
    cores = len(os.sched_getaffinity(0))
    where: dict[str, Any] = {
        "backend": "Ray, a process for each pool" if config.cluster else "one process",
        "platform": jax.default_backend(),
        "cores": cores,
        **bench.about("jax"),
    }
    table = Table("alone: critic", "alone: reference", "together", "together / sum")
    table.add_row(
        *(f"{figures[f'{name}_s']:.3f} s" for name in ("critic", "reference", "together")),
        f"{figures['together_over_sum']:.2f}",
    )
    Console().print(table, f"{where['backend']}, {cores} cores; trace: {flags.trace}")
    if flags.json:
        flags.json.write_text(json.dumps(where | figures, indent=2) + "\n")
    if config.cluster and cores > 1 and figures["together_over_sum"] >= LIMIT:
        raise SystemExit(f"together take {figures['together_over_sum']} of the sum; expected less than {LIMIT}")


if __name__ == "__main__":
    main()
