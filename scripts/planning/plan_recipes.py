"""Plans of every recipe of configs/recipes on its hardware, and the table of docs/recipes.md.

    python -m scripts.planning.plan_recipes [--write] [--compile]

Memory, seconds and hours are the plan's, for prompts of maximum length and responses of an assumed mean length.
`--compile` measures the memory of the programs with the chip's own compiler, for recipes that compile in minutes.
Nothing is downloaded, and no accelerator is needed.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from rich.console import Console
from rich.markdown import Markdown

from jaxrlhf import planner
from jaxrlhf.config import CommandLine, Config, override, shipped
from jaxrlhf.config.cli.override import find, setting_names
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import PlacementPlan, PlacementProblem
from jaxrlhf.planner.schedules.lengths import LognormalLengths
from jaxrlhf.planner.schedules.predict import predictions
from jaxrlhf.planner.search.mapping import search
from scripts.pages import DOCS, RESULTS, renew

PAGE = DOCS / "recipes.md"
COMPILED = RESULTS / "recipes.json"
EXPORTED = {
    "models/hh_reward_model": "Qwen/Qwen2.5-7B-Instruct",
    "models/tldr_sft": "Qwen/Qwen2.5-1.5B",
    "models/tldr_reward_model": "Qwen/Qwen2.5-1.5B",
}
"""Models that an earlier stage exports, each with a published model of the same shape."""


@dataclass(frozen=True)
class Recipe:
    """Recipe in one row of the table.

    Attributes:
      name: Name of the configuration.
      hardware: Devices to plan for, in the format of the plan command.
      response_tokens: Assumed mean number of tokens of a response.
      words: Command-line flags that change settings.
      tail: 99th percentile of response lengths, to simulate the recipe's schedule; None uses the plan's step seconds.
      compiles: Whether the programs compile within minutes on two cores.
    """

    name: str
    hardware: str
    response_tokens: int
    words: tuple[str, ...] = ()
    tail: int | None = None
    compiles: bool = False

    @property
    def called(self) -> str:
        """Name of the row."""
        return " ".join((self.name, *self.words))

    def config(self) -> Config:
        """Return the configuration, with published models in place of models that have yet to be trained."""
        config, _ = CommandLine().parse_config(["--config", self.name, *self.words])
        values = {name: find(config, name)[0] for name in setting_names(config)}
        return override(config, {name: EXPORTED[value] for name, value in values.items() if value in [*EXPORTED]})


SMALL, LARGE = (("--model.path", f"Qwen/Qwen2.5-{size}-Instruct") for size in ("0.5B", "7B"))
RECIPES = (
    Recipe("gsm8k_grpo", "h100x1x1", 250, SMALL, compiles=True),
    Recipe("gsm8k_grpo", "h100x1x1", 250, compiles=True),
    Recipe("gsm8k_grpo", "h100x1x8", 250, LARGE),
    Recipe("math_grpo", "v5e-8", 500, SMALL),
    Recipe("math_grpo", "v5e-8", 500),
    Recipe("math_grpo", "h100x1x8", 500, LARGE),
    Recipe("dapo_math_7b", "h100x1x8", 3000),
    Recipe("dapo_math_32b", "h100x16x8", 5000),
    Recipe("dapo_math_32b", "v5p-128", 5000, ("--hardware", "v5p-128", "--cluster.devices-per-host", "4")),
    Recipe("gspo_moe_30b", "h100x16x8", 3000),
    Recipe("deepscaler_1_5b", "h100x1x8", 6000, tail=20_000),
    Recipe("deepcoder_14b", "h100x4x8", 8000),
    Recipe("retool_7b", "h100x1x8", 3000),
    Recipe("hh_reward_model", "h100x1x8", 256, compiles=True),
    Recipe("hh_ppo", "h100x1x8", 300),
    Recipe("tldr_sft", "h100x1x1", 40, compiles=True),
    Recipe("tldr_reward_model", "h100x1x1", 40, compiles=True),
    Recipe("tldr_ppo", "h100x1x8", 40),
)


@dataclass(frozen=True)
class Planned:
    """Best plan of a recipe.

    Attributes:
      peak_bytes: Peak bytes of a device.
      memory_bytes: Memory of a device.
      offload: Models or optimizers that are offloaded to host memory.
    """

    recipe: Recipe
    config: Config
    peak_bytes: float
    memory_bytes: float
    step_s: float
    offload: tuple[str, ...]

    @property
    def hours(self) -> float:
        """Hours of all steps."""
        return self.step_s * self.config.steps / 3600

    @property
    def model(self) -> str:
        """Name of the initial model, without its owner."""
        return str(getattr(self.config.model, "path", "")).rpartition("/")[2]

    @property
    def memory(self) -> str:
        """Peak and available memory of a device in GiB, as text."""
        return f"{self.peak_bytes / 2**30:.0f} of {self.memory_bytes / 2**30:.0f}"

    @property
    def seconds(self) -> str:
        """Seconds of a step, as text."""
        return f"{self.step_s:,.{0 if self.step_s > 10 else 1}f}"


def plan(recipe: Recipe) -> Planned:
    """Return the best plan of a recipe on its hardware.

    Raises:
      Infeasible: The recipe does not fit.
    """
    config = recipe.config()
    hardware, problem, best = _searched(recipe, config)
    found = Planned(
        recipe,
        config,
        peak_bytes=max(pool.peak_bytes for pool in best.pools),
        memory_bytes=hardware.memory_bytes,
        step_s=best.seconds,
        offload=best.offload,
    )
    if recipe.tail is None:
        return found
    drawn = LognormalLengths(recipe.response_tokens, recipe.tail, config.rollout.max_response_tokens)
    rollout = config.rollout
    asked = predictions(problem, best, drawn, staleness=rollout.staleness, over_provision=rollout.over_provision)
    return replace(found, step_s=asked[1].prediction.step_s)  # the first prediction is the synchronous schedule


def _searched(recipe: Recipe, config: Config) -> tuple[Hardware, PlacementProblem, PlacementPlan]:
    hardware = planner.hardware_of(config, recipe.hardware)
    lengths = planner.Lengths(response_tokens=recipe.response_tokens)
    problem = planner.question_of(config, hardware, lengths=lengths).problem
    return hardware, problem, search(problem).plans[0]


def compiled_bytes(recipe: Recipe) -> int:
    """Return the peak bytes of a device in the programs of the best plan, by the chip's own compiler."""
    from jaxrlhf.planner.topology import topology
    from jaxrlhf.trainer.programs import compile_plan

    config = recipe.config()
    hardware, problem, best = _searched(recipe, config)
    programs = compile_plan(config, problem, best, topology(hardware))
    return round(planner.compiled_to_json(programs, hardware)["peak_bytes"])


def links(name: str) -> str:
    """Return the first two sources in the docstring of a recipe, as links."""
    text = " ".join(shipped()[name].read_text().partition("Source: ")[2].partition('"""')[0].split())
    found = re.findall(r"https://[^\s,;)]+|arXiv:\d{4}\.\d{5}", text)[:2]
    papers = {one: f"https://arxiv.org/abs/{one.partition(':')[2]}" for one in found if one.startswith("arXiv:")}
    return ", ".join(f"[{one if one in papers else one.rpartition('/')[2]}]({papers.get(one, one)})" for one in found)


def table(planned: Sequence[Planned], compiled: Mapping[str, int]) -> str:
    """Return the Markdown table of plans, with the compiler's bytes where they are known."""
    lines = [
        "| recipe | model | hardware | GiB of a device | by the compiler | in host memory | tokens of a response "
        "| seconds a step | steps | hours | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in planned:
        recipe, known = one.recipe, compiled.get(one.recipe.called)
        cells = (
            f"[{recipe.name}](../configs/recipes/{recipe.name}.py)",
            one.model,
            f"`{recipe.hardware}`",
            one.memory,
            "" if known is None else f"{known / 2**30:.0f}",
            ", ".join(one.offload),
            f"{recipe.response_tokens:,}",
            one.seconds,
            f"{one.config.steps:,}",
            f"{one.hours:,.1f}",
            links(recipe.name),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def described(text: str, planned: Sequence[Planned]) -> str:
    """Return the text of a recipe file with the `Planned:` paragraph of its docstring replaced."""
    says = "; ".join(
        f"{one.model} on {one.recipe.hardware} {one.memory} GiB of a device, {one.seconds} s a step, {one.hours:,.1f} h"
        for one in planned
    )
    paragraph = textwrap.fill(f"Planned: {says}.", 120, break_on_hyphens=False)
    return re.sub(r"^Planned: .*?\n\n", f"{paragraph}\n\n", text, count=1, flags=re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the command."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--write", action="store_true", help="renew docs/recipes.md and the recipes' docstrings")
    command.add_argument("--compile", action="store_true", help="compile those that take minutes; recipes.json")
    flags = command.parse_args()
    if flags.compile:
        for recipe in RECIPES:
            if recipe.compiles:
                known = json.loads(COMPILED.read_text()) if COMPILED.is_file() else {}
                known[recipe.called] = {"bytes": compiled_bytes(recipe), "jax": version("jax")}
                COMPILED.write_text(json.dumps(known, indent=2) + "\n")
    planned = [plan(recipe) for recipe in RECIPES]
    found = table(planned, compiled())
    Console(width=240).print(Markdown(found))
    if flags.write:
        renew(PAGE, {"recipes": found})
        for name, path in shipped().items():
            if of := [one for one in planned if one.recipe.name == name]:
                path.write_text(described(path.read_text(), of))


def compiled() -> dict[str, int]:
    """Read the compiler's bytes of a device, for the recipes that were compiled."""
    return {name: one["bytes"] for name, one in json.loads(COMPILED.read_text()).items()}


if __name__ == "__main__":
    main()
