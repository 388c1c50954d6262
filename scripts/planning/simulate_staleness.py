"""Simulation of asynchronous schedules of a 7B DAPO run on H20s, compared with a run that verl reports.

    python -m scripts.planning.simulate_staleness [--devices 128] [--write]

verl's documentation (docs/advance/fully_async.md, "Asynchronous Training on 7B Model") reports Qwen2.5-Math-7B, DAPO,
512 prompts x 16 responses of at most 28k tokens on H20s: seconds of colocated synchronous steps by stage, and an
asynchronous run on 64 generating and 64 learning GPUs that is 2.35 to 2.67 times as fast. Seconds of learning are
verl's, interpolated between its rows of 32, 64 and 128 GPUs in proportion to 1 / GPUs. Asynchronous steps take only the
seconds of verl's update, because verl then skips the pass for old log-probabilities. Seconds of generation are the cost
model's. verl does not report response lengths: the mean is a guess, and the tail is varied. On 1024 devices there are
eight times as many prompts, and eight times as many GPUs learn in the same seconds. No accelerator is needed. `--write`
renews the table in docs/planning.md.
"""

import argparse
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from jaxrlhf.config import ROLLOUT, Pretrained, load, override
from jaxrlhf.planner.hardware import KNOWN_HARDWARE
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.problem import Lengths, question_of
from jaxrlhf.planner.schedules.lengths import LognormalLengths
from jaxrlhf.planner.schedules.predict import times_of
from jaxrlhf.planner.schedules.simulation import Schedule, simulate
from jaxrlhf.planner.search.mapping import search
from scripts.pages import DOCS, renew

H20 = replace(
    KNOWN_HARDWARE["h100"],
    name="h20",
    memory_bytes=96e9,
    matmul_flops_per_s=148e12,
    memory_bytes_per_s=4.0e12,
    source="96 GB at 4.0 TB/s and 148 TFLOPS of bfloat16, as widely listed; all else as h100",
)
PROMPT_TOKENS, MEAN_TOKENS, LONGEST = 150, 1700, 28 * 1024
TAILS = (5_000, 10_000, 20_000)
"""99th percentiles of the lognormal response lengths, in tokens."""
SCHEDULES = ((1, 1.0), (4, 1.0), (2, 1.5), (4, 1.5))
"""Staleness and over-provisioning of each schedule."""
GENERATING = (32, 48, 64, 80)
"""Numbers of generating devices to try, out of 128 devices."""
GPUS, OLD_LOGP_S, UPDATE_S = (128, 64, 32), (53.92, 70.26, 107.71), (113.81, 133.41, 269.80)
"""verl's colocated synchronous rows: GPUs, seconds of old log-probabilities, seconds of the update."""


def problem(devices: int) -> PlacementProblem:
    """Return the placement problem; the paged KV cache of a response is assumed to be twice the mean length."""
    config = override(
        load("dapo_arithmetic"),
        {
            "model": Pretrained("Qwen/Qwen2.5-7B"),
            "rollout.prompts_per_step": 512 * devices // 128,
            "rollout.responses_per_prompt": 16,
            "rollout.max_prompt_tokens": 2048,
            "rollout.max_response_tokens": LONGEST,
            "rollout.slots": None,
            "actor.tokens_per_microbatch": 2**15 * devices,
            "algorithm.responses_per_update": 512 * devices // 128,
        },
    )
    hardware = replace(H20, machines=devices // H20.devices_per_machine)
    found = question_of(config, hardware, lengths=Lengths(PROMPT_TOKENS, MEAN_TOKENS)).problem
    pages = 2 * (PROMPT_TOKENS + MEAN_TOKENS) / found.workload.longest_tokens
    return replace(found, software=replace(found.software, cache_copies=pages))


def learning_s(seconds: tuple[float, ...], share: float) -> float:
    """Interpolate verl's seconds for a share of the 128 devices."""
    return float(np.interp(1 / (128 * share), [1 / gpus for gpus in GPUS], seconds))


def rows_of(devices: int, console: Console) -> list[str]:
    """Return the table's rows: schedules with half of the devices generating, as in verl, and with the best split."""
    asked = problem(devices)
    work, many = asked.workload, devices // 128
    together = search(replace(asked, pools=((("actor",), devices),)), keep=1).plans[0]
    whole = replace(times_of(asked, together), learn_s=learning_s(OLD_LOGP_S, 1) + learning_s(UPDATE_S, 1))
    splits = {}
    for generating in GENERATING:
        pools = (("actor",), devices - generating * many), ((ROLLOUT,), generating * many)
        splits[generating] = search(replace(asked, pools=pools), keep=1).plans[0]
    lines = []
    for tail in TAILS:
        lengths = LognormalLengths(MEAN_TOKENS, tail, LONGEST)
        sizes = {"groups": work.prompts, "copies": work.responses // work.prompts, "steps": 10}
        synchronous = simulate(Schedule(), whole, lengths, **sizes)
        generation_s = synchronous.step_s - whole.learn_s
        console.print(f"{devices} devices, tail {tail}: a synchronous step generates for {generation_s:.0f} s")
        for staleness, more in SCHEDULES:
            schedule, found = Schedule(staleness, more, apart=True), {}
            for generating, plan in splits.items():
                times = times_of(asked, plan, over_provision=more)
                times = replace(times, learn_s=learning_s(UPDATE_S, 1 - generating / 128))
                found[generating] = simulate(schedule, times, lengths, **sizes)
            best = min(found, key=lambda generating: found[generating].step_s)
            half, fastest = found[64], found[best]
            cells = [devices, f"{tail:,}", staleness, f"{more:g}", f"{synchronous.step_s:.0f} ({generation_s:.0f})"]
            cells += [f"{half.step_s:.0f}", f"{synchronous.step_s / half.step_s:.2f}"]
            cells += [f"{half.generation_idle:.0%}, {half.learning_idle:.0%}", f"{half.age_mean:.2f}"]
            cells += [f"{synchronous.step_s / fastest.step_s:.2f} with {best * many}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
            console.print(lines[-1], markup=False, highlight=False)
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[128], help="numbers of H20s, multiples of 128")
    parser.add_argument("--write", action="store_true", help="renew the table in docs/planning.md")
    flags = parser.parse_args()
    console = Console(stderr=True, soft_wrap=True)
    headings = ["devices", "99 % of lengths", "staleness", "over-provision", "synchronous s (generation)"]
    headings += ["half and half s", "times", "idle: generate, learn", "mean age", "times, best split"]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for devices in [128, 1024] if flags.write else flags.devices:
        lines += rows_of(devices, console)
    Console().print(Markdown("\n".join(lines)))
    if flags.write:
        renew(DOCS / "planning.md", {"staleness": "\n".join(lines)})


if __name__ == "__main__":
    main()
