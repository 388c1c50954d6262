"""Roofline: lower bound of the seconds of each workload on this machine, next to the measured seconds.

    python -m scripts.benchmarks.roofline

Measures the rate of float32 matrix products and the memory bandwidth, counts the operations and bytes that the
mathematics needs, and writes the results of this machine and their table in docs/benchmarks.md. `compare_peers`
measured the seconds on this machine.

Counted are: prompts once for each group, in every phase; in every decode step the weights and the filled KV cache of
unfinished responses; one forward pass of the reference, except in SFT; three forward passes for an update, with the
head only on trained tokens; one read and write of AdamW's state. A decode step takes the longer of its products and its
memory traffic. Activations, sampling, rewards and repeated work are not counted. Only weights that stay in the
processor's caches can be read faster.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from scripts.benchmarks import chat_workload as chat
from scripts.benchmarks import workload as bench
from scripts.benchmarks.compare_peers import machine_file
from scripts.benchmarks.workload import END_PROBABILITY, SHORTEST_PROMPT, Preset, Workload
from scripts.pages import add_folders, renew

BYTES = 4  # per float32
ADAMW_NUMBERS = 7  # per weight: weight, gradient and two moments are read; weight and moments are written
PHASES = ("generate_s", "prepare_s", "update_s", "step_s")
CHAT_LENGTHS = {
    "smollm2_grpo": (173, 128),
    "smollm2_ppo": (172, 128),
    "smollm2_sft": (149, 81),
    "smollm2_dpo": (125, 61),
}
"""Mean numbers of tokens of the prompts and of the responses in the records of each workload of SmolLM2."""
WITHOUT = {"sft": ("generate_s", "prepare_s"), "dpo": ("generate_s",)}
"""Phases that an algorithm does not have."""


@dataclass(frozen=True)
class Machine:
    """Peak rates of the machine."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Return the seconds of work that is bound by compute or by memory bandwidth."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


def workloads() -> dict[str, Workload]:
    """Return all workloads by name; in those of SmolLM2 every text has the mean length."""
    real = {
        name: replace(chat.WORKLOADS[name], prompt_tokens=prompt, new_tokens=response)
        for name, (prompt, response) in CHAT_LENGTHS.items()
    }
    return real | bench.WORKLOADS


def prompt_lengths(workload: Workload) -> dict[int, float]:
    """Return the probability of each prompt length."""
    if not bench.PRESETS[workload.preset].ends:
        return {workload.prompt_tokens: 1.0}
    lengths = range(SHORTEST_PROMPT, workload.prompt_tokens + 1)
    return dict.fromkeys(lengths, 1 / len(lengths))


def going_on(workload: Workload) -> np.ndarray:
    """Return the probability that a response has more than s tokens, for s = 0, 1, ... below the limit."""
    stay = 1 - END_PROBABILITY if bench.PRESETS[workload.preset].ends else 1.0
    return stay ** np.arange(workload.new_tokens)


def generated_tokens(workload: Workload) -> float:
    """Return the expected number of tokens of all responses of a step."""
    return workload.sequences * float(going_on(workload).sum())


def generate_s(workload: Workload, machine: Machine) -> float:
    """Return the least seconds of prefill, once per group, and of decode steps that read weights and filled cache."""
    preset = bench.PRESETS[workload.preset]
    prompt = sum(length * share for length, share in prompt_lengths(workload).items())
    flops = workload.prompts * sum(
        share * bench.forward_flops(preset, 1, length, read=1) for length, share in prompt_lengths(workload).items()
    )
    seconds = machine.seconds(flops, BYTES * _read_weights(preset))
    width = preset.hidden // preset.heads
    for step, share in enumerate(going_on(workload)[1:], start=1):  # prefill samples the first token
        active, filled = workload.sequences * share, prompt + step
        any_active = 1 - (1 - share) ** workload.sequences
        products = 2 * _read_weights(preset) + preset.layers * 4 * preset.heads * width * filled
        cache = 2 * preset.layers * preset.kv_heads * width * filled
        moved_bytes = BYTES * (any_active * _read_weights(preset) + active * cache)
        seconds += machine.seconds(active * products, moved_bytes)
    return seconds


def forward_flops(workload: Workload, *, head: bool) -> float:
    """Return the expected FLOPs of a pass over prompts and responses of a step, with or without response logits."""
    preset = bench.PRESETS[workload.preset]
    on = going_on(workload)
    exactly = on - np.append(on[1:], 0.0)  # probability of 1, 2, ... tokens
    pairs = ((p, r, p_share * exactly[r - 1]) for p, p_share in prompt_lengths(workload).items() for r in _counts(on))
    whole = sum(share * bench.forward_flops(preset, 1, p + r, read=r if head else 0) for p, r, share in pairs if share)
    prompt = sum(share * bench.forward_flops(preset, 1, p, read=0) for p, share in prompt_lengths(workload).items())
    return workload.sequences * whole - (workload.sequences - workload.prompts) * prompt


def least(workload: Workload, machine: Machine) -> dict[str, float]:
    """Return the least seconds of each phase."""
    preset, ppo = bench.PRESETS[workload.preset], workload.algorithm == "ppo"
    policy = forward_flops(workload, head=True)
    value = forward_flops(workload, head=False) if ppo else 0.0
    trained = _weights(preset) + (_weights(preset) - preset.head_parameters if ppo else 0)
    found = {
        "generate_s": generate_s(workload, machine),
        "prepare_s": (policy + value) / machine.flops_per_s,
        "update_s": 3 * (policy + value) / machine.flops_per_s + BYTES * ADAMW_NUMBERS * trained / machine.bytes_per_s,
    }
    for phase in WITHOUT.get(workload.algorithm, ()):
        del found[phase]
    return {**found, "step_s": sum(found.values())}


def _counts(on: np.ndarray) -> range:
    return range(1, len(on) + 1)


def _read_weights(preset: Preset) -> int:
    """Return the number of weights that a decode step reads, without the few rows of an untied embedding."""
    return preset.matmul_parameters + preset.head_parameters


def _weights(preset: Preset) -> int:
    """Return the number of all weights, except norms and biases."""
    return preset.matmul_parameters + preset.head_parameters * (1 if preset.tied else 2)


def _best_s(call: Callable[[], Any], repeats: int) -> float:
    call().block_until_ready()  # compiles
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_machine() -> Machine:
    """Measure square products for compute, and a triad and a matrix-vector product larger than caches for bandwidth."""
    import jax
    import jax.numpy as jnp

    product, rates = jax.jit(jnp.matmul), []
    for size in (1024, 2048, 4096):
        square = jax.random.normal(jax.random.key(0), (size, size))
        rates.append(2 * size**3 / _best_s(partial(product, square, square), 5))
    count, rounds = 2**25, 8
    a, b = jnp.ones(count), jnp.ones(count)
    # One program runs all rounds: a new output in every call would measure how fast the system allocates pages.
    triad = jax.jit(lambda a, b: jax.lax.fori_loop(0, rounds, lambda _, x: 0.5 * x + b, a)[:8])
    triad_s = _best_s(partial(triad, a, b), 3) / rounds
    matrix, vector = jnp.ones((4096, count // 4096)), jnp.ones(count // 4096)
    read_s = _best_s(partial(product, matrix, vector), 5)
    return Machine(max(rates), max(3 * BYTES * count / triad_s, BYTES * count / read_s))


def compare(machine: Machine, measured: dict[str, Any]) -> dict[str, Any]:
    """Return, for each workload, the least seconds, our seconds, and least seconds as a share of our seconds."""
    found = {}
    for name, workload in workloads().items():
        limit = {phase: round(seconds, 4) for phase, seconds in least(workload, machine).items()}
        ours = measured.get(name, {}).get("jaxrlhf", {})
        share = {phase: round(limit[phase] / ours[phase], 3) for phase in limit if phase in ours}
        rate = {}
        if "generate_s" in limit:
            rate = {"generated_tokens_per_s": round(generated_tokens(workload) / limit["generate_s"], 1)}
        found[name] = {
            "least": limit | rate,
            "measured": {phase: ours[phase] for phase in share},
            "share": share,
        }
    return found


def table(content: dict[str, Any]) -> str:
    """Return a Markdown table of a machine's least and measured seconds, with their ratio."""
    lines = ["| workload | generate | prepare | update | step |", "|---|---|---|---|---|"]
    for name, entry in content["workloads"].items():
        cells = []
        for phase in PHASES:
            cell = f"{entry['least'][phase]:.3g}" if phase in entry["least"] else ""
            if phase in entry["share"]:
                cell += f" / {entry['measured'][phase]:.3g} ({100 * entry['share'][phase]:.0f} %)"
            cells.append(cell)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    flops_per_s, bytes_per_s = content["machine"]["flops_per_s"], content["machine"]["bytes_per_s"]
    rates = f"{flops_per_s / 1e9:.0f} GFLOP/s in float32 products, {bytes_per_s / 1e9:.1f} GB/s"
    return "\n".join([f"{content['processor']}: {rates}.", "", *lines])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_folders(parser)
    flags = parser.parse_args()
    machine, peers = measure_machine(), machine_file(flags.results)
    found = compare(machine, json.loads(peers.read_text()) if peers.exists() else {})
    content = {
        "machine": {"flops_per_s": round(machine.flops_per_s), "bytes_per_s": round(machine.bytes_per_s)},
        **bench.about("jax"),
        "workloads": found,
    }
    results = flags.results / peers.name.replace("peers", "roofline")
    results.write_text(json.dumps(content, indent=2) + "\n")
    files = sorted(flags.results.glob("roofline*.json"), key=lambda file: file != results)
    tables = [table(json.loads(file.read_text())) for file in files]
    renew(flags.docs / "benchmarks.md", {"roofline": "\n\n".join(["Seconds at best / measured (share).", *tables])})
    print(table(content))


if __name__ == "__main__":
    main()
