"""`python -m jaxrlhf.plan --config NAME --hardware a100x16x8`: predict the best placement before anything runs.

It prints the best plans, the time that each part of the best plan takes, why the second plan is worse, and the settings
to paste. It needs no accelerator; without `--hardware` it plans for the devices of this machine. Pools and layouts that
the configuration sets are kept and costed; `--afresh` searches them too.

    python -m jaxrlhf.plan --config ppo_gsm8k --hardware h100x1 --compile

`--compile` compiles every program of the best plan with the chip's own compiler, and reports how much device memory
each program takes and how much it sends to other devices. This needs no chip and no weights, but `pip install
'jaxrlhf[compile]'`.

    python -m jaxrlhf.plan --config grpo_gsm8k --hardware h100x2 --staleness 1 --length-mean 150 --length-tail 500

`--staleness`, optionally with `--over-provision`, simulates that schedule next to the synchronous one, on every split
of the devices between generation and learning. Response lengths are those of a run (`--lengths samples.jsonl`), or
lognormal with a mean and a 99th percentile; without either, all are `--response-tokens` long.
"""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrlhf.config import CommandLine, Config, Refusal, on_cluster, run_command
from jaxrlhf.config.cli.outputs import check_file

if TYPE_CHECKING:
    from jaxrlhf.planner.compiled import CompiledProgram
    from jaxrlhf.planner.hardware import Hardware
    from jaxrlhf.planner.plan import PlacementPlan, PlacementProblem
    from jaxrlhf.planner.schedules.lengths import ResponseLengths


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf plan",
        description="Find the best placement of a run on devices.",
        examples=[
            ("--config ppo_gsm8k --model.path Qwen/Qwen2.5-7B-Instruct --hardware h100x4", "on other devices"),
            ("--config ppo_gsm8k --hardware v5p-16 --compile", "checked by the chip's own compiler"),
        ],
    )
    command.add_argument("--hardware", help="such as h100, a100x16x8, v5p-128, or a .json file of other figures")
    command.add_argument("--plans", type=int, default=5, metavar="N", help="plans to show, one per placement")
    command.add_argument(
        "--prompt-tokens", type=float, metavar="N", help="expected mean prompt length; default: the maximum"
    )
    command.add_argument("--response-tokens", type=float, metavar="N", help="mean response length; default: maximum")
    command.add_argument("--accepted", type=float, metavar="P", help="accepted share of drafts; default: no drafts")
    command.add_argument("--picture", metavar="FILE", help="file for the timeline; default: plan_NAME.png")
    command.add_argument("--json", action="store_true", help="print only one JSON object; draw only with --picture")
    command.add_argument("--afresh", action="store_true", help="search pools, layouts and offload even if they are set")
    command.add_argument("--compile", action="store_true", help="compile every program of the best plan for the chip")
    command.add_argument("--cluster", choices=["ray", "None"], help="plan for hosts joined by Ray, as in `train`")
    command.add_argument(
        "--staleness", type=int, metavar="K", help="also simulate this rollout.staleness; default: as configured"
    )
    command.add_argument("--over-provision", type=float, metavar="F", help="with this rollout.over_provision, 1 to 2")
    command.add_argument("--lengths", metavar="FILE", help="response lengths from a run's samples.jsonl")
    command.add_argument("--length-mean", type=float, metavar="N", help="mean of lognormal response lengths")
    command.add_argument("--length-tail", type=float, metavar="N", help="99th percentile of lognormal response lengths")
    config, flags = command.parse_config(implied=on_cluster)
    if flags.plans < 1:
        raise Refusal(f"--plans must be 1 or more, got {flags.plans}")
    if flags.picture is None and not flags.json:
        flags.picture = f"plan_{config.name}.png"
    if flags.picture is not None:
        check_file("--picture", Path(flags.picture), ".png", ".svg", ".pdf")
    _plan(config, flags)


def _plan(written: Config, flags: Namespace) -> None:
    from jaxrlhf import planner
    from jaxrlhf.planner.report import report
    from jaxrlhf.planner.schedules.lengths import constant_lengths
    from jaxrlhf.planner.schedules.predict import predictions
    from jaxrlhf.planner.schedules.report import recommendation, recommended, schedules_table, schedules_to_json
    from jaxrlhf.planner.search.mapping import binding_slots, search
    from jaxrlhf.tracking import default_console, say

    config = planner.without_placement(written) if flags.afresh else written
    hardware = planner.hardware_of(config, flags.hardware)
    distribution = _lengths(config, flags)
    mean = flags.response_tokens if distribution is None else distribution.mean
    lengths = planner.Lengths(flags.prompt_tokens, mean, flags.accepted)
    question = planner.question_of(config, hardware, lengths=lengths)
    found = search(question.problem, keep=max(2, flags.plans))  # two, to explain why the second is worse
    best = found.plans[0]
    bound = binding_slots(question.problem, best)
    scheduled, rollout = [], config.rollout
    ahead, more = rollout.staleness, rollout.over_provision
    if flags.staleness is not None:
        ahead, more = flags.staleness, 1.0 if flags.over_provision is None else flags.over_provision
    # On one pool a staleness of whole batches gains nothing, so no schedules are simulated for it.
    if flags.staleness is not None or (ahead and (more > 1 or config.generates_apart)):
        distribution = distribution or constant_lengths(max(1, round(question.problem.workload.response_tokens)))
        scheduled = predictions(question.problem, best, distribution, staleness=ahead, over_provision=more)
    notes = (*question.notes, *([bound] if bound else []))
    if flags.picture is not None:
        title = planner.timeline_title(config, hardware)
        planner.draw_timeline(best, title=title).savefig(flags.picture, dpi=130)
    code = planner.snippet(config, best, written=written)  # to be pasted into the configuration as written
    console = default_console()
    if not flags.json:
        console.print(report(found, hardware, notes, shown=flags.plans))
        console.print(f"timeline of the best plan: {flags.picture}", markup=False, highlight=False)
    compiled = _compile(config, hardware, question.problem, best) if flags.compile else None
    if flags.json:
        rows = {
            "config": config.name,
            "hardware": asdict(hardware),
            "workload": asdict(question.problem.workload),
            "plans": [planner.plan_to_json(plan) for plan in found.plans[: flags.plans]],
            "search": {name: getattr(found, name) for name in ("placements", "allocations", "simulated", "seconds")},
            "settings": code,
            "notes": notes,
        }
        if scheduled:
            rows["schedules"] = schedules_to_json(scheduled)
        if compiled is not None:
            rows["compiled"] = planner.compiled_to_json(compiled, hardware)
        print(json.dumps(rows, indent=2))
        if compiled is not None:
            planner.check_fits(compiled, hardware)
        return
    if compiled is not None:
        console.print()
        console.print(planner.compiled_report(compiled, hardware))
        planner.check_fits(compiled, hardware)
    if scheduled:
        console.print()
        console.print(schedules_table(scheduled))
        say(recommendation(scheduled))
        if (chosen := recommended(scheduled)) is not None:
            best, code = chosen.plan, planner.snippet(config, chosen.plan, written=written)
            say(f"set rollout.staleness={ahead}" + (f" and rollout.over_provision={more:g}" if more > 1 else ""))
    say(f"\n{_advice(code)}")


def _lengths(config: Config, flags: Namespace) -> "ResponseLengths | None":
    """Return the distribution of response lengths from the flags; None if they give only a mean, or nothing."""
    from jaxrlhf.planner.schedules.lengths import LognormalLengths, read_lengths

    ways = [flags.lengths is not None, flags.length_mean is not None, flags.response_tokens is not None]
    if sum(ways) > 1:
        raise Refusal("--lengths, --length-mean and --response-tokens all set response lengths; give only one of them")
    if (flags.length_mean is None) != (flags.length_tail is None):
        raise Refusal("--length-mean and --length-tail require each other; give both")
    if flags.over_provision is not None and flags.staleness is None:
        raise Refusal("--over-provision requires --staleness, which allows postponed groups; give both")
    if flags.lengths is not None:
        return read_lengths(flags.lengths)
    if flags.length_mean is not None:
        return LognormalLengths(flags.length_mean, flags.length_tail, config.rollout.max_response_tokens)
    return None


def _compile(
    config: Config, hardware: "Hardware", problem: "PlacementProblem", plan: "PlacementPlan"
) -> list["CompiledProgram"]:
    """Compile the programs of a plan, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    from jaxrlhf.planner.topology import topology
    from jaxrlhf.trainer.programs import compile_plan

    devices = topology(hardware)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("lowering every program", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bars.update(bar, description=f"compiling {name}", completed=done, total=total)

        return compile_plan(config, problem, plan, devices, progress=progress)


def _advice(code: str) -> str:
    """Return advice on how to run the plan."""
    if not code:
        return "the configuration already has the best plan"
    return (
        "to use the best plan, paste this into the configuration file:\n\n"
        f"from jaxrlhf.config import Layout, Pool, override\n\n{code}\n\n"
        "or set placement='auto' to plan at every start, for the devices that are found"
    )


if __name__ == "__main__":
    run_command(main)
