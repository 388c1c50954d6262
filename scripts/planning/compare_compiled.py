"""Comparison of the memory that plans estimate with the memory that the compilers of H100 and v5p allocate.

    JAX_PLATFORMS=cpu python -m scripts.planning.compare_compiled [--cases "7B fsdp" ...] [--chips h100x1 ...] [--write]
    JAX_PLATFORMS=cpu python -m scripts.planning.compare_compiled --estimates

A case is a policy on some devices in one layout. Four programs of a case are compiled: the update (forward and backward
of a microbatch), the forward pass, prefill, and decoding of all slots. All cases take an hour on two notebook cores.
`--write` renews compiled.json and the table in docs/accelerators.md after every case; `--estimates` renews only
the plans' figures, without compilers. `jaxrlhf[compile]` installs the compilers.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jaxrlhf.config import Config, Layout, Lora, load, override
from jaxrlhf.models.huggingface.config import write_fields
from jaxrlhf.planner.compiled import CompiledProgram, compile_programs
from jaxrlhf.planner.cost.programs import GENERATION, ExpectedPrograms
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.plan import PlacementPlan, PlacementProblem
from jaxrlhf.planner.problem import question_of
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.shapes import shape_of
from jaxrlhf.planner.topology import compiler_options, topology
from jaxrlhf.trainer.programs import lower_plan
from scripts.pages import DOCS, RESULTS, renew

COMPARED = ("actor.gradient", "actor.forward", "generation.prefill", "generation.decode")
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """Policy and its training settings.

    Attributes:
      tokens: `tokens_per_microbatch`, over all devices.
      longest: Maximum tokens of a sequence, half of them for the response. A model with fewer positions is extended.
      response: Maximum tokens of a response, if not half of `longest`.
      group: Number of responses of a step, all to one prompt; None keeps the groups of the recipe.
      prompts: Number of prompts of a step of two updates, with eight responses each; None keeps the recipe's number.
    """

    model: str
    layout: Layout
    remat: str
    tokens: int = 65_536
    lora: Lora | None = None
    longest: int = 1024
    response: int | None = None
    group: int | None = None
    prompts: int | None = None

    def config(self) -> Config:
        """Return the GRPO configuration of the case."""
        response = self.response or self.longest // 2
        settings: dict[str, Any] = {
            "model.path": long_enough(self.model, self.longest),
            "compute_dtype": "bfloat16",
            "actor.layout": self.layout,
            "actor.remat": self.remat,
            "actor.tokens_per_microbatch": self.tokens,
            "actor.lora": self.lora,
            "rollout.max_prompt_tokens": self.longest - response,
            "rollout.max_response_tokens": response,
            "reference_layout": None,
            "devices": None,
            "kl": None,
        }
        if self.prompts is not None:
            settings |= {"rollout.prompts_per_step": self.prompts, "rollout.responses_per_prompt": 8}
            settings["algorithm.responses_per_update"] = 4 * self.prompts
        config = load("grpo_gsm8k")
        settings["algorithm.kl"] = settings.pop("kl")
        if self.group is not None:
            settings |= {"rollout.prompts_per_step": 1, "rollout.responses_per_prompt": self.group}
            settings["algorithm.responses_per_update"] = self.group
        return override(config, settings)


@cache
def long_enough(model: str, positions: int) -> str:
    """Return the path of a model's configuration, or of a copy with `positions` positions if the model has fewer."""
    shape, _ = shape_of(model)
    if positions <= shape.max_positions:
        return model
    folder = Path(tempfile.mkdtemp())
    fields = write_fields(replace(shape, max_positions=positions), "lm", dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return str(folder)


SEVEN, EIGHT, MIXTURE = "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"
LATENT, HALF = "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen2.5-0.5B"
CASES = {
    "0.5B data": Case(HALF, Layout(data=8), "none"),
    "0.5B data, recomputed": Case(HALF, Layout(data=8), "full"),
    "7B fsdp": Case(SEVEN, Layout(fsdp=8, generation_tensor=2), "none", tokens=32_768),
    "7B fsdp, recomputed": Case(SEVEN, Layout(fsdp=8, generation_tensor=2), "full"),
    "7B fsdp tensor, recomputed": Case(SEVEN, Layout(fsdp=2, tensor=4, generation_tensor=4), "full"),
    "8B tensor": Case(EIGHT, Layout(data=2, tensor=4, generation_tensor=4), "none", tokens=16_384),
    "7B stage tensor": Case(SEVEN, Layout(stage=4, tensor=2, generation_tensor=2), "none", tokens=32_768),
    "7B stage fsdp, recomputed": Case(SEVEN, Layout(stage=2, fsdp=4, generation_tensor=2), "full"),
    "7B rows of 32k": Case(SEVEN, Layout(fsdp=8, generation_tensor=2), "full", tokens=8 * 2**15, longest=2**15),
    "7B rows of 32k context": Case(
        SEVEN, Layout(fsdp=2, context=4, generation_tensor=2), "full", tokens=2 * 2**15, longest=2**15
    ),
    "7B rows of 128k context": Case(SEVEN, Layout(context=8), "full", tokens=2**17, longest=2**17, prompts=8),
    "7B rows of 128k context, offloaded": Case(
        SEVEN, Layout(context=8), "offload", tokens=2**17, longest=2**17, prompts=8
    ),
    "7B rows of 1M context": Case(
        SEVEN, Layout(fsdp=2, context=32), "full", tokens=2 * 2**20, longest=2**20, prompts=8
    ),
    "8B rows of 128k context": Case(EIGHT, Layout(context=8), "full", tokens=2**17, longest=2**17),
    "7B 128k prompt, 32 responses": Case(
        SEVEN, Layout(), "full", tokens=2**17, longest=2**17, response=2**13, group=32
    ),
    "7B 1M prompt, 4 responses, shared cache": Case(
        SEVEN, Layout(context=8, generation_context=8), "full", tokens=2**20, longest=2**20, response=2**13, group=4
    ),
    "8B LoRA fsdp": Case(EIGHT, Layout(fsdp=8, generation_tensor=2), "none", tokens=32_768, lora=Lora(rank=32)),
    "8B LoRA fsdp, recomputed": Case(EIGHT, Layout(fsdp=8, generation_tensor=2), "full", lora=Lora(rank=32)),
    "30B experts, recomputed": Case(MIXTURE, Layout(expert=8), "full"),
    "30B experts fsdp": Case(MIXTURE, Layout(fsdp=2, expert=4), "none", tokens=16_384),
    "16B latents experts, recomputed": Case(LATENT, Layout(expert=8), "full"),
    "16B latents experts fsdp": Case(LATENT, Layout(fsdp=2, expert=4), "none", tokens=16_384),
}


def planned(case: Case, chips: str) -> tuple[Config, PlacementProblem, PlacementPlan]:
    """Return configuration, problem and plan of a case on chips with unlimited memory."""
    config = case.config()
    problem = question_of(config, replace(hardware(chips), memory_bytes=1e15)).problem
    return config, problem, search(problem).plans[0]


def compare(case: Case, chips: str, programs: Sequence[str]) -> list[CompiledProgram]:
    """Compile programs of a case."""
    config, problem, plan = planned(case, chips)
    generation = any(name.startswith(GENERATION) for name in programs)
    lowered = lower_plan(config, problem, plan, topology(hardware(chips)), generation=generation)
    chosen = {name: program for name, program in lowered.items() if name.partition("[")[0] in programs}
    options = compiler_options(hardware(chips))
    return compile_programs(chosen, ExpectedPrograms(problem, plan), options=options)


def estimates(case: Case, chips: str) -> dict[str, float | None]:
    """Return the bytes that plans estimate for each compared program of a case."""
    _, problem, plan = planned(case, chips)
    expected = ExpectedPrograms(problem, plan)
    return {name: expected.of(name).program for name in COMPARED}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: GiB of a device by plan and by compiler, and their relative difference."""
    lines = ["| case | chip | program | plan | compiler | apart |", "|---|---|---|---:|---:|---:|"]
    for row in rows:
        plan, compiled = row["estimated_bytes"] / GIB, row["compiled_bytes"] / GIB
        apart = f"{plan / compiled - 1:+.0%}"
        lines.append(f"| {row['case']} | {row['chips']} | {row['program']} | {plan:.2f} | {compiled:.2f} | {apart} |")
    return "\n".join(lines)


def row_of(name: str, chips: str, program: CompiledProgram) -> dict[str, Any]:
    """Return the row of compiled.json for a program."""
    return {
        "case": name,
        "chips": chips,
        "program": program.name.partition("[")[0],
        "estimated_bytes": program.estimated_bytes,
        "compiled_bytes": program.compiled_bytes,
        "needed_bytes": program.needed_bytes,
        "argument_bytes": program.argument_bytes,
        "temporary_bytes": program.temporary_bytes,
        "collectives": [vars(each) for each in program.collectives or ()],
        "seconds": program.seconds,
    }


def write(rows: list[dict[str, Any]]) -> None:
    """Replace the saved rows of the same programs by new rows, and renew the table of the page."""
    file = RESULTS / "compiled.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    by_name = {(row["chips"], row["case"], row["program"]): row for row in [*known, *rows]}
    cases = list(CASES)
    order = sorted(by_name, key=lambda key: (key[0], cases.index(key[1]), COMPARED.index(key[2])))
    known = [by_name[key] for key in order]
    file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    renew(DOCS / "accelerators.md", {"compiled": table(known)})


def estimate_again(cases: list[str], chips: list[str]) -> None:
    """Renew the plan's figures in saved rows; the compilers' figures stay."""
    known = json.loads((RESULTS / "compiled.json").read_text(encoding="utf-8"))
    for case, chip in itertools.product(cases, chips):
        rows = [row for row in known if (row["case"], row["chips"]) == (case, chip)]
        expected = estimates(CASES[case], chip) if rows else {}
        rows = [row | {"estimated_bytes": expected[row["program"]]} for row in rows]
        print(*table(rows).splitlines()[2:], sep="\n", flush=True)
        write(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--chips", nargs="+", default=["h100x1", "v5p-16"])
    parser.add_argument("--programs", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--estimates", action="store_true", help="renew the plan's figures only")
    given = parser.parse_args()
    if given.estimates:
        estimate_again(given.cases, given.chips)
        return
    for chips, name in itertools.product(given.chips, given.cases):
        start = time.perf_counter()
        rows = [row_of(name, chips, program) for program in compare(CASES[name], chips, given.programs)]
        print(*table(rows).splitlines()[2:], f"{time.perf_counter() - start:.0f} s", sep="\n", flush=True)
        if given.write:
            write(rows)


if __name__ == "__main__":
    main()
