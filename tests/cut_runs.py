"""A program that runs an algorithm with state of its own: `cut_runs.py ALGORITHM WORKDIR [STEP]`.

With a step the program is killed after it, once the checkpoint of the step before is on disk.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tiny_runs import get_config, numbers, training

import jaxrlhf
from jaxrlhf.config import (
    PRIME,
    AdaptiveKL,
    Algorithm,
    Arithmetic,
    Config,
    Constraint,
    FormatReward,
    KLInReward,
    Ptx,
    Rewards,
    SafeRLHF,
)

STEPS, SAVED = 4, 2
_PATIENCE_S = 120
_KL = KLInReward(coefficient=0.01, adaptive=AdaptiveKL(target=0.1, horizon=100))


def algorithm_of(name: str) -> Algorithm:
    """Two updates a step, and every number that an algorithm carries along moves."""
    if name == "PRIME":
        return PRIME(
            responses_per_update=16,
            kl=_KL,
            process_reward=training(),
            beta=0.5,
            least_accuracy=0.1,
            most_accuracy=0.9,
            max_rounds=3,
        )
    return SafeRLHF(
        responses_per_update=16,
        kl=_KL,
        constraint=Constraint(limit=0.2, learning_rate=0.2),
        critic=training(),
        cost_critic=training(),
        ptx=Ptx(data=Arithmetic(difficulty=1, train_problems=60), examples_per_update=4),
    )


def config_of(name: str) -> Config:
    """8 x 4 responses a step, of which about half have a digit and earn something, and some a letter and cost."""
    tiny = get_config()
    return replace(
        tiny,
        model=replace(tiny.model, num_layers=1),
        rewards=Rewards(parts=(FormatReward(r"(?s).*[0-9].*", weight=1.0), FormatReward(r"(?s).*[a-e].*", weight=0.0))),
        cold_start=None,
        algorithm=algorithm_of(name),
        rollout=replace(tiny.rollout, prompts_per_step=8, responses_per_prompt=4),
        steps=STEPS,
        evaluation=replace(tiny.evaluation, every_steps=0, problems=1),
    )


def whole_and_resumed(name: str, folder: Path) -> tuple[list[dict], list[dict]]:
    """The numbers of a run, and of one that was killed after step 3 and went on from the checkpoint of step 2."""
    ours = {key: value for key, value in os.environ.items() if key not in ("NPROC", "JAX_PLATFORMS")}
    cache = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}

    def start(workdir: Path, *last: int) -> subprocess.CompletedProcess:
        command = [sys.executable, __file__, name, str(workdir), *map(str, last)]
        return subprocess.run(command, env={**ours, **cache}, capture_output=True, text=True, timeout=900)

    whole, cut = folder / "whole", folder / "cut"
    done = start(whole)
    assert done.returncode == 0, done.stderr
    died = start(cut, SAVED + 1)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert len(numbers(cut / "metrics.jsonl")) == SAVED + 1
    done = start(cut)
    assert done.returncode == 0, done.stderr
    assert f"step {SAVED} of {STEPS} is done" in done.stdout
    assert (cut / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    return numbers(whole / "metrics.jsonl"), numbers(cut / "metrics.jsonl")


def main() -> None:
    name, workdir, *last = sys.argv[1:]

    def die(step: int, _) -> None:
        if [str(step)] == last:
            deadline = time.monotonic() + _PATIENCE_S
            while not Path(workdir, f"checkpoints/step_{SAVED}").is_dir():
                assert time.monotonic() < deadline, f"step {SAVED} was never saved"
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    jaxrlhf.run(replace(config_of(name), workdir=workdir), on_step=die)


if __name__ == "__main__":
    main()
