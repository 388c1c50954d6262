"""Placement search for the test bed of the HybridFlow paper, compared with the placements of the paper.

    python -m scripts.planning.reproduce_hybridflow [--write]

16 machines of 8 A100-80GB; Llama of 7, 13, 34 and 70 B weights; 1024 prompts of 1024 tokens with responses of 1024
tokens, eight updates a step (arXiv:2409.19256, section 8.1). Weights are bfloat16, gradients and Adam float32,
pipelines 1F1B as in Megatron-LM, with two sequences to a microbatch. The hardware is the built-in `a100`. For the
placements the network has the rate implied by the paper's transition at 70 B, equal in every row. `--write` renews
hybridflow.json and the tables in docs/planning.md.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from jaxrlhf.config import Layout
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.cost.cost import switch_bytes, switch_cost
from jaxrlhf.planner.hardware import Hardware, hardware
from jaxrlhf.planner.plan import Infeasible, PlacementPlan, PlacementProblem
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.shapes import SHAPES
from jaxrlhf.planner.workload import Role, Software, Workload
from scripts.pages import DOCS, RESULTS, renew

MODELS: dict[str, ModelConfig] = {
    "7B": SHAPES["meta-llama/Llama-2-7b-hf"],
    "13B": SHAPES["meta-llama/Llama-2-13b-hf"],
    # The paper's 34 B Llama has CodeLlama's shape. CodeLlama's 16 extra vocabulary rows would prevent sharding.
    "34B": replace(SHAPES["codellama/CodeLlama-34b-hf"], vocab_size=32_000),
    "70B": SHAPES["meta-llama/Llama-2-70b-hf"],
}
MEGATRON = Software(
    weight_bytes=2,
    gradient_bytes=4,
    optimizer_bytes=12,  # float32 weights and two moments
    compute_bytes=2,
    pipeline_parts_per_stage=None,
    scatters_between_stages=True,
    head_on_last_stage=True,
    unstacks_layers=False,
    cache_copies=1.0,
    decode_tokens_per_dispatch=None,
    reads_responses=False,
)
STEP = Workload(prompts=1024, responses=1024, prompt_tokens=1024, response_tokens=1024, longest_tokens=2048, updates=8)
SEQUENCES_PER_MICROBATCH = 2
ROLES = ("actor", "critic", "reference", "reward")

COLOCATE, SPLIT, STANDALONE = "colocate", "split", "standalone"
CRITIC_APART = "critic apart"
PLACEMENTS: dict[str, frozenset[frozenset[str]]] = {
    COLOCATE: frozenset({frozenset(ROLES)}),
    SPLIT: frozenset({frozenset({"actor", "reference"}), frozenset({"critic", "reward"})}),
    STANDALONE: frozenset(frozenset({role}) for role in ROLES),
    CRITIC_APART: frozenset({frozenset({"actor", "reference", "reward"}), frozenset({"critic"})}),
}
FOUND_BY_PAPER: dict[tuple[str, str], dict[int, str]] = {
    ("7B", "7B"): {16: COLOCATE, 32: COLOCATE, 64: COLOCATE},
    ("13B", "13B"): {16: COLOCATE, 32: COLOCATE, 64: COLOCATE, 96: SPLIT, 128: STANDALONE},
    ("34B", "34B"): {32: COLOCATE, 64: COLOCATE, 96: SPLIT, 128: SPLIT},
    ("70B", "70B"): {64: COLOCATE},
    ("13B", "70B"): {32: COLOCATE, 64: COLOCATE, 96: SPLIT, 128: CRITIC_APART},
}
"""Placement by actor and critic, then by devices. The reference has the actor's size, the reward model the critic's."""

TRANSITIONS: dict[str, Layout] = {
    "7B": Layout(data=2, tensor=8, generation_tensor=2),
    "13B": Layout(data=2, tensor=8, generation_tensor=4),
    "34B": Layout(data=2, stage=4, tensor=8, generation_tensor=8),
    "70B": Layout(data=2, stage=8, tensor=8, generation_tensor=8),
}
STAGES_OF_PAPER = {"7B": (1,), "13B": (1,), "34B": (1, 2, 4), "70B": (1, 2, 4, 8)}
"""Pipeline stages in the paper's settings, and fewer where devices do not divide; tensor shards are always 8."""

TRANSITION_70B_S = 78.2 * (1 - 0.891) / 0.891
"""Seconds of the paper's transition at 70 B, which saves 89.1 % (78.2 s) according to the paper."""


def test_bed(devices: int) -> Hardware:
    """Return machines of eight A100s with the network rate of the paper's transition at 70 B.

    In this transition each device received (64 - 8) / (8 * 64) of 70 B bfloat16 weights from other machines: 1.6 GB/s,
    half of a device's share of 200 Gb/s.
    """
    machines = hardware(f"a100x{devices // 8}x8")
    received = switch_bytes(MODELS["70B"], TRANSITIONS["70B"], itemsize=2)
    network = received / TRANSITION_70B_S / machines.link_efficiency
    return replace(machines, network_bytes_per_s=network, usable_memory=0.9)  # instead of JAX's share


def ppo(actor: str, critic: str) -> tuple[Role, ...]:
    """Return the roles of the four models; log-probabilities of the responses come from generation."""
    rows = SEQUENCES_PER_MICROBATCH
    return (
        Role("actor", MODELS[actor], "lm", generates=True, passes=0, trained=True, rows_per_microbatch=rows),
        Role("critic", MODELS[critic], "value", trained=True, rows_per_microbatch=rows),
        Role("reference", MODELS[actor], "lm", rows_per_microbatch=rows),
        Role("reward", MODELS[critic], "score", rows_per_microbatch=rows),
    )


def problem(actor: str, critic: str, devices: int, **settings: Any) -> PlacementProblem:
    """Return the placement problem on whole machines of eight devices; every model may be offloaded to the host."""
    offloads = ((), ("actor.optimizer", "critic.optimizer"), ROLES)
    given: dict[str, Any] = {"offloads": offloads, "fsdp": False, **settings}
    return PlacementProblem(ppo(actor, critic), STEP, MEGATRON, test_bed(devices), **given)


def placement_of(plan: PlacementPlan) -> str:
    """Return the paper's name of a placement, or the pools if the paper has no name for it."""
    pools = frozenset(frozenset(pool.roles) for pool in plan.pools)
    named = next((name for name, roles in PLACEMENTS.items() if roles == pools), None)
    return named or " | ".join("+".join(pool.roles) for pool in plan.pools)


def compare(actor: str, critic: str, devices: int) -> dict[str, Any]:
    """Return the step seconds of each placement that the paper compares, and of the best placement."""
    plans = search(problem(actor, critic, devices), keep=15).plans
    limited = search(problem(actor, critic, devices, layouts=paper_layouts(actor, critic)), keep=15).plans
    return {
        "actor": actor,
        "critic": critic,
        "devices": devices,
        "seconds": compared(plans, critic_apart=actor != critic),
        "seconds_with_layouts_of_paper": compared(limited, critic_apart=actor != critic),
        "best_s": plans[0].seconds,
        "pools": {"+".join(pool.roles): pool.devices for pool in plans[0].pools},
    }


def compared(plans: Sequence[PlacementPlan], *, critic_apart: bool) -> dict[str, float]:
    """Return the step seconds by the paper's name of the placement."""
    seconds = {placement_of(plan): plan.seconds for plan in plans}
    names = [COLOCATE, SPLIT, STANDALONE] + [CRITIC_APART] * critic_apart
    return {name: seconds[name] for name in names if name in seconds}


def paper_layouts(actor: str, critic: str) -> dict[str, tuple[Layout, ...]]:
    """Return the paper's stages and tensor shards for actor and critic; the actor generates with any tensor size."""
    generating = [(stage, tensor) for stage in STAGES_OF_PAPER[actor] for tensor in (1, 2, 4, 8)]
    return {
        "actor": tuple(Layout(stage=stage, tensor=8, generation_tensor=tensor) for stage, tensor in generating),
        "critic": tuple(Layout(stage=stage, tensor=8) for stage in STAGES_OF_PAPER[critic]),
    }


def placements() -> list[dict[str, Any]]:
    """Search every case of the paper."""
    cases = [(*models, devices) for models, found in FOUND_BY_PAPER.items() for devices in found]
    rows = []
    for actor, critic, devices in track(cases, "searching", console=Console(stderr=True)):
        row = compare(actor, critic, devices)
        paper = FOUND_BY_PAPER[actor, critic][devices]
        found = {
            name: min(row[seconds], key=row[seconds].get)
            for name, seconds in (("found", "seconds"), ("found_with_layouts", "seconds_with_layouts_of_paper"))
        }
        rows.append(row | found | {"paper": paper, "margin": margin(row["seconds"], paper)})
    return rows


def margin(seconds: Mapping[str, float], paper: str) -> float | None:
    """Return the extra time of the best other placement relative to the paper's placement; negative if it is faster.

    None if no other placement fits.
    """
    others = [value for name, value in seconds.items() if name != paper]
    return min(others) / seconds[paper] - 1 if others else None


def generation_splits() -> list[dict[str, Any]]:
    """Predict seconds of generation, with the switch to it, by generation tensor size; 16 devices train in 1-8-2."""
    rows = []
    for size, paper in (("7B", 2), ("13B", 4)):
        seconds = {}
        for tensor in (1, 2, 4, 8):
            trained = {role: (Layout(tensor=8),) for role in ROLES}
            layouts = trained | {"actor": (Layout(tensor=8, generation_tensor=tensor),)}
            given = {"layouts": layouts, "pools": ((ROLES, 16),), "offloads": ((),)}
            try:
                seconds[tensor] = search(problem(size, size, 16, **given)).plans[0].stage_seconds["generate"]
            except Infeasible:
                continue
        found = min(seconds, key=lambda tensor: seconds[tensor])
        rows.append({"model": size, "paper": paper, "found": found, "seconds": seconds})
    return rows


def transitions() -> list[dict[str, Any]]:
    """Predict the seconds of the switch from training to generation in the paper's layouts on the built-in hardware."""
    machines = hardware("a100x16x8")
    rows = []
    for size, layout in TRANSITIONS.items():
        seconds = switch_cost(MODELS[size], layout, MEGATRON, machines).seconds
        rows.append({"model": size, "predicted_s": seconds, "paper_s": TRANSITION_70B_S if size == "70B" else None})
    return rows


def tables(result: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Return the three tables in Markdown."""
    lines = ["| actor, critic | GPUs | paper | found | margin | found with the paper's p and t | best of all |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in result["placements"]:
        models = row["actor"] if row["actor"] == row["critic"] else f"{row['actor']}, {row['critic']}"
        free, limited = (
            f"**{row[name]}**" if row[name] != row["paper"] else row[name] for name in ("found", "found_with_layouts")
        )
        share = "no other fits" if row["margin"] is None else f"{row['margin']:+.1%}"
        pools = ", ".join(f"{roles} {devices}" for roles, devices in row["pools"].items())
        cells = [models, row["devices"], row["paper"], free, share, limited, f"{pools}: {row['best_s']:.0f} s"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    found = {"placements": "\n".join(lines)}
    lines = ["| model | paper | found | 1 | 2 | 4 | 8 |", "|---|---|---|---|---|---|---|"]
    for row in result["generation"]:
        cells = [
            f"{row['seconds'][tensor]:.1f} s" if tensor in row["seconds"] else "too large" for tensor in (1, 2, 4, 8)
        ]
        lines.append(f"| {row['model']} | {row['paper']} | {row['found']} | {' | '.join(cells)} |")
    found["generation"] = "\n".join(lines)
    lines = ["| model | paper | predicted |", "|---|---|---|"]
    for row in result["transitions"]:
        paper = "in a figure only" if row["paper_s"] is None else f"{row['paper_s']:.1f} s"
        lines.append(f"| {row['model']} | {paper} | {row['predicted_s']:.2f} s |")
    found["transitions"] = "\n".join(lines)
    return found


def reproduce() -> dict[str, list[dict[str, Any]]]:
    """Compute all results."""
    return {"placements": placements(), "generation": generation_splits(), "transitions": transitions()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew results and tables")
    flags = parser.parse_args()
    result = reproduce()
    found = tables(result)
    Console().print(Markdown("\n\n".join(found.values())))
    if flags.write:
        (RESULTS / "hybridflow.json").write_text(json.dumps(result, indent=2) + "\n")
        renew(DOCS / "planning.md", found)


if __name__ == "__main__":
    main()
