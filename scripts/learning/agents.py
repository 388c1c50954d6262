"""Plot of how agents learn from random weights: to use tools, and to play games of several turns.

    python -m scripts.learning.agents [--seeds 0 1 2] [--only calculator treasure ...] [--folder DIR]

Writes `agents_learning.json` (accuracy and the share of episodes that call a tool, by step and seed; wall-clock
seconds and CPU seconds) and `docs/agents.png` after every run. Accuracy is that of greedy held-out answers. In games it
is the share of a step's sampled games that are won, because greedy play may win from the start.
The seed determines the initial weights, the order of the demonstrations and the samples. Runs that imitate the same
demonstrations (calculator runs in one format, runs that guess numbers) share one cold start per seed; `--folder` keeps
the cold starts.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.figure import Figure

import jaxrlhf
from jaxrlhf.config import GRPO, PPO, SFT, Agent, Checkpointing, Config, Evaluation, Generated, Pretrained, Tools, load
from jaxrlhf.conversations.conversation import Conversation, TokenSequence
from jaxrlhf.tracking.plots import read_curves
from jaxrlhf.trainer.policy import export_policy
from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS, ROOT

FILE = RESULTS / "agents_learning.json"
EXAMPLES = ROOT / "scripts" / "examples"
HELD_OUT = 256
BLUE, GREY = "#3b6fb6", "#999999"
PACKAGES = ("jax", "openai", "openai-agents", "langgraph", "langchain-openai", "smolagents", "gymnasium")
CALLS = "eval/tool/episodes_share"


def broken(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Such as "47*86".
    """
    return "error"


def calculator() -> Config:
    """Return the run whose policy calls the calculator as a tool."""
    return replace(load("tools_arithmetic"), steps=8)


def useless() -> Config:
    """Return the run whose tool, `broken`, computes nothing."""
    tools = Tools(functions=("scripts.learning.agents:broken",), max_turns=3, observation_tokens=16)
    return replace(load("tools_arithmetic"), steps=8, environment=tools)


def client() -> Config:
    """Return the run whose agent program uses OpenAI's client."""
    config = load("agent_openai")
    return replace(config, steps=4, rollout=replace(config.rollout, prompts_per_step=8))


def agent_of(file: str) -> Config:
    """Return the run whose agent program is a file of the examples, with an agent of a framework."""
    config = client()
    assert isinstance(config.environment, Agent)
    return replace(config, environment=replace(config.environment, program=f"{EXAMPLES / file}:run"))


def smol() -> Config:
    """Return the run with an agent of smolagents, and with demonstrations in the format of smolagents."""
    config = agent_of("smolagents_agent.py")
    assert config.cold_start is not None
    steps = Generated(f"{EXAMPLES / 'smolagents_agent.py'}:steps", train_problems=12_800)
    shorter = replace(config.cold_start, steps=250, algorithm=SFT(examples_per_update=16))
    return replace(
        config,
        steps=6,
        algorithm=GRPO(responses_per_update=16),
        cold_start=replace(shorter, data=steps, max_prompt_tokens=192),
        rollout=replace(config.rollout, max_prompt_tokens=192, max_response_tokens=192),
    )


def treasure_without_states() -> Config:
    """Return the treasure game trained with GRPO, where all steps of a game have the same advantage."""
    return replace(load("game_treasure"), algorithm=GRPO(responses_per_update=64))


def higher_lower_without_states() -> Config:
    """Return the higher-or-lower game trained with GRPO, where all steps of a game have the same advantage."""
    return replace(load("game_higher_lower"), algorithm=GRPO(responses_per_update=256))


def higher_lower_with_critic() -> Config:
    """Return the higher-or-lower game trained with PPO, with values and advantages per turn."""
    config = load("game_higher_lower")
    return replace(config, algorithm=PPO(responses_per_update=256, actions="turns", lam=0.95, critic=config.actor))


RUNS: dict[str, Callable[[], Config]] = {
    "calculator": calculator,
    "a tool that fails": useless,
    "no mask": calculator,  # `learn` trains on the tool's answers too
    "OpenAI's client": client,
    "openai-agents": partial(agent_of, "openai_agents_agent.py"),
    "LangGraph": partial(agent_of, "langgraph_agent.py"),
    "smolagents": smol,
    "Python": partial(load, "tools_python"),
    "search": partial(load, "tools_retrieval"),
    "treasure": partial(load, "game_treasure"),
    "treasure, GRPO": treasure_without_states,
    "higher or lower": partial(load, "game_higher_lower"),
    "higher or lower, GRPO": higher_lower_without_states,
    "higher or lower, PPO": higher_lower_with_critic,
    "frozen lake": partial(load, "game_frozen_lake"),
}
GUESSES = ("higher or lower", "higher or lower, GRPO", "higher or lower, PPO")
GAMES = ("treasure", "treasure, GRPO", "frozen lake", *GUESSES)
WHOLE = ("Python", "search", "treasure", "treasure, GRPO", "frozen lake")
"""Runs that include their own cold start; other runs share one per seed if they imitate the same demonstrations."""


def without_masks(conversation: Conversation) -> tuple[TokenSequence, ...]:
    """Return the rows of an episode with a loss on all tokens after the first prompt, including tool answers."""
    return tuple(unmasked_row(row) for row in SEQUENCES(conversation))


def unmasked_row(row: TokenSequence) -> TokenSequence:
    """Mark all tokens from the first sampled token on as sampled; inserted tokens count to the reply before them."""
    if 1 not in row.mask:
        return row
    first, turn = row.mask.index(1), list(row.turn)
    for place in range(first + 1, len(turn)):
        turn[place] = turn[place] if row.mask[place] else turn[place - 1]
    drawn = len(row.mask) - first
    version = (-1,) * first + (max(row.version),) * drawn
    return replace(row, mask=(0,) * first + (1,) * drawn, turn=tuple(turn), version=version)


SEQUENCES = Conversation.sequences


def learn(config: Config, folder: Path, name: str, seed: int) -> tuple[dict[int, float], dict[int, float]]:
    """Run; return the accuracy, and the share of held-out episodes that call a tool, by step."""
    every = 4 if config.steps > 8 else 2
    config = replace(
        config,
        seed=seed,
        evaluation=Evaluation(every_steps=every, problems=HELD_OUT if config.rollout.prompts_per_step > 8 else 64),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        workdir=str(folder / f"{name}_{seed}"),
    )
    if name not in WHOLE:
        config = replace(config, model=imitating(config, folder, seed), cold_start=None)
    sequences = without_masks if name == "no mask" else SEQUENCES
    with mock.patch.object(Conversation, "sequences", sequences):
        jaxrlhf.run(config)
    curves = read_curves(config.folder / "metrics.jsonl")
    return dict(curves["score/mean" if name in GAMES else "eval/accuracy"]), dict(curves.get(CALLS, {}))


def imitating(config: Config, folder: Path, seed: int) -> Pretrained:
    """Return the policy of a seed's cold start; train and export it unless the folder has it."""
    assert config.cold_start is not None
    shown = config.cold_start.data or config.data
    assert isinstance(shown, Generated)
    kind = shown.function.rpartition(":")[2]
    exported = folder / f"policy_{kind}_{seed}"
    if not exported.exists():
        cold = replace(config, workdir=str(folder / f"begun_{kind}_{seed}")).phases[0]
        jaxrlhf.run(cold)
        export_policy(cold.folder, exported)
    return Pretrained(str(exported))


def draw(curves: dict[str, dict[str, Any]], calls: dict[str, dict[str, Any]]) -> Figure:
    """Plot a panel for each kind of run: a line per seed, and a dotted line for episodes with tool calls."""
    rows = -(-len(curves) // 4)
    figure = Figure(figsize=(10, 2.2 * rows + 0.3), layout="constrained")
    for place, (name, seeds) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(rows, 4, place)
        for curve in seeds.values():
            axes.plot([int(step) for step in curve], list(curve.values()), color=BLUE, linewidth=1.2)
        for curve in calls.get(name, {}).values():
            axes.plot([int(step) for step in curve], list(curve.values()), ":", color=GREY, linewidth=1)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("accuracy", fontsize=9)
    return figure


def core_seconds() -> float:
    """Return the CPU seconds, user and system, of this process and of the child processes that it has waited for."""
    taken = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in taken)


def about() -> dict[str, Any]:
    """Return machine, versions, date and load of a measurement."""
    there = {package.name for package in distributions()}
    return bench.about(*[package for package in PACKAGES if package in there]) | {"load": os.getloadavg()[2]}


def main() -> None:
    """Measure, write and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--folder", type=Path, help="folder of the runs; by default a temporary folder")
    flags = parser.parse_args()
    measured: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"accuracy": {}, "about": {}}
    with tempfile.TemporaryDirectory() as place:
        for seed in flags.seeds:
            for name in flags.only:
                start, cores = time.monotonic(), core_seconds()
                curve, calls = learn(RUNS[name](), flags.folder or Path(place), name, seed)
                measured["about"][name] = about()
                measured["accuracy"].setdefault(name, {})[str(seed)] = curve
                if calls:
                    measured.setdefault("calls", {}).setdefault(name, {})[str(seed)] = calls
                took = {"seconds": time.monotonic() - start, "core_seconds": core_seconds() - cores}
                for unit, amount in took.items():
                    measured.setdefault(unit, {}).setdefault(name, {})[str(seed)] = round(amount)
                FILE.write_text(json.dumps(measured) + "\n")
                done = json.loads(FILE.read_text())  # all keys are strings after reading
                curves = {name: done["accuracy"][name] for name in RUNS if name in done["accuracy"]}
                draw(curves, done.get("calls", {})).savefig(DOCS / "agents.png", dpi=110)


if __name__ == "__main__":
    main()
