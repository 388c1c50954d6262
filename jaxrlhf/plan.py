"""`python -m jaxrlhf.plan --config NAME --hardware a100x16x8`: the best placement, predicted before anything runs.

It prints the best plans, where the seconds of the best one go, why the next one lost, and the settings to paste. It
needs no accelerator: without `--hardware` it plans for the devices that are here. Pools that the configuration gives
are costed as they are, layouts that it gives are kept; `--afresh` searches all of it.

    python -m jaxrlhf.plan --config ppo_gsm8k --hardware h100x1 --compile

`--compile` has the chip's own compiler compile every program of the best plan, and says what each takes of a device's
memory and sends to others. No chip and no weights are needed, but `pip install 'jaxrlhf[compile]'`.

    python -m jaxrlhf.plan --config grpo_gsm8k --hardware h100x2 --staleness 1 --length-mean 150 --length-tail 500

`--staleness`, and `--over-provision` beside it, simulate that schedule beside the synchronous one, on every split of
the devices between generation and learning. Response lengths are those of a run (`--lengths samples.jsonl`), or
lognormal with a mean and a 99th percentile; else all are of `--response-tokens`.
"""

import json
from argparse import Namespace
from dataclasses import asdict
from functools import partial
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
    """The command."""
    command = CommandLine(
        prog="jaxrlhf plan",
        description="Find the best placement of a run on devices.",
        examples=[
            ("--config ppo_gsm8k --model.path Qwen/Qwen2.5-7B-Instruct --hardware h100x4", "on devices to be rented"),
            ("--config ppo_gsm8k --hardware v5p-16 --compile", "checked by the chip's own compiler"),
        ],
    )
    command.add_argument("--hardware", help="such as h100, a100x16x8, v5p-128, or a file that jaxrlhf.calibrate wrote")
    command.add_argument("--plans", type=int, default=5, metavar="N", help="how many to show, one of each placement")
    command.add_argument(
        "--prompt-tokens", type=float, metavar="N", help="the mean that is expected; the most if unset"
    )
    command.add_argument("--response-tokens", type=float, metavar="N", help="the mean that is expected, likewise")
    command.add_argument("--picture", metavar="FILE", help="where the timeline goes; default: plan_NAME.png")
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else, draw if asked to")
    command.add_argument("--afresh", action="store_true", help="search pools, layouts and offload that are given too")
    command.add_argument("--compile", action="store_true", help="compile every program of the best plan for the chip")
    command.add_argument("--cluster", choices=["ray", "None"], help="plan for hosts joined by Ray, as `train` does")
    command.add_argument(
        "--staleness", type=int, metavar="K", help="simulate this rollout.staleness beside 0; default: as given"
    )
    command.add_argument("--over-provision", type=float, metavar="F", help="with groups under way of F steps, 1 to 2")
    command.add_argument("--lengths", metavar="FILE", help="response lengths of a run, its samples.jsonl")
    command.add_argument("--length-mean", type=float, metavar="N", help="mean of lognormal response lengths")
    command.add_argument("--length-tail", type=float, metavar="N", help="their 99th percentile")
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

    config = planner.freed(written) if flags.afresh else written
    hardware = planner.hardware_of(config, flags.hardware)
    drawn = _lengths(config, flags)
    mean = flags.response_tokens if drawn is None else drawn.mean
    lengths = planner.Lengths(flags.prompt_tokens, mean)
    question = planner.question_of(config, hardware, lengths=lengths)
    found = search(question.problem, keep=max(2, flags.plans))  # two, to say why the second lost
    best = found.plans[0]
    bound = binding_slots(question.problem, best)
    scheduled, rollout = [], config.rollout
    ahead, more = rollout.staleness, rollout.over_provision
    if flags.staleness is not None:
        ahead, more = flags.staleness, 1.0 if flags.over_provision is None else flags.over_provision
    parts = written.rollout.stream_parts if ahead == 0 else 1
    # On one pool whole batches that wait gain nothing, so that a configuration that has them there needs no table.
    if flags.staleness is not None or parts > 1 or (ahead and (more > 1 or config.generates_apart)):
        drawn = drawn or constant_lengths(max(1, round(question.problem.workload.response_tokens)))
        simulated = partial(predictions, keeps=rollout.on_new_weights == "keep", stream_parts=parts)
        scheduled = simulated(question.problem, best, drawn, staleness=ahead, over_provision=more)
    notes = (*question.notes, *([bound] if bound else []))
    if flags.picture is not None:
        title = planner.timeline_title(config, hardware)
        planner.draw_timeline(best, title=title).savefig(flags.picture, dpi=130)
    code = planner.snippet(config, best, written=written)  # it is pasted into what is written
    console = default_console()
    if not flags.json:
        console.print(report(found, hardware, notes, shown=flags.plans))
        console.print(f"timeline of the best plan: {flags.picture}", markup=False, highlight=False)
    compiled = _compile(config, hardware, question.problem, best, flags) if flags.compile else None
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
            named = f"staleness={ahead}" if parts == 1 else f"stream_parts={parts}"
            say(f"set rollout.{named}" + (f" and rollout.over_provision={more:g}" if more > 1 else ""))
    say(f"\n{_advice(code)}")


def _lengths(config: Config, flags: Namespace) -> "ResponseLengths | None":
    """Distribution of response lengths that the flags give; None if they give a mean alone, or nothing."""
    from jaxrlhf.planner.schedules.lengths import LognormalLengths, read_lengths

    ways = [flags.lengths is not None, flags.length_mean is not None, flags.response_tokens is not None]
    if sum(ways) > 1:
        raise Refusal("--lengths, --length-mean and --response-tokens each say how long responses are; give one")
    if (flags.length_mean is None) != (flags.length_tail is None):
        raise Refusal("--length-mean and --length-tail are of one distribution; give both")
    if flags.over_provision is not None and flags.staleness is None:
        raise Refusal("--over-provision puts off groups as often as --staleness allows; give that too")
    if flags.lengths is not None:
        return read_lengths(flags.lengths)
    if flags.length_mean is not None:
        return LognormalLengths(flags.length_mean, flags.length_tail, config.rollout.max_response_tokens)
    return None


def _compile(
    config: Config, hardware: "Hardware", problem: "PlacementProblem", plan: "PlacementPlan", flags: Namespace
) -> list["CompiledProgram"]:
    """Compile the programs of a plan, with a bar on standard error, and draw them."""
    from rich.console import Console
    from rich.progress import Progress

    from jaxrlhf import planner
    from jaxrlhf.planner.topology import topology
    from jaxrlhf.trainer.programs import compile_plan

    devices = topology(hardware)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("lowering every program", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bars.update(bar, description=f"compiling {name}", completed=done, total=total)

        compiled = compile_plan(config, problem, plan, devices, progress=progress)
    if flags.picture is not None:
        path = Path(flags.picture)
        beside = path.with_name(f"{path.stem}_compiled{path.suffix}")
        title = planner.timeline_title(config, hardware)
        planner.draw_compiled(compiled, hardware, title=title).savefig(beside, dpi=130)
    return compiled


def _advice(code: str) -> str:
    """Advice on how to run the plan."""
    if not code:
        return "the configuration runs the best plan as it is"
    return (
        "to run it, paste into the configuration file:\n\n"
        f"from jaxrlhf.config import Layout, Pool, override\n\n{code}\n\n"
        "or set placement='auto', and every start of the run plans for the devices it finds"
    )


if __name__ == "__main__":
    run_command(main)
