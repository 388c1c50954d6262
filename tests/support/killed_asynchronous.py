"""Runs at a staleness: each whole, and each killed and resumed; some killed at five moments.

    python killed_asynchronous.py FOLDER [NAME ...]

FOLDER/NAME/whole and FOLDER/NAME/cut are the workdirs. FOLDER/NAME/ends.json has for each run how it ended and the
step of the last whole checkpoint that it left. Each run is a fork of this process, which has imported everything and
started no device.
"""

import gc
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jax._src import xla_bridge
from resumed_runs import config_of, forked

from jaxrlhf.config import GRPO, PPO, Config, Pool, Rollout
from jaxrlhf.engine import Engine
from jaxrlhf.trainer import log
from jaxrlhf.trainer.asynchronous.off_policy import OffPolicy
from jaxrlhf.trainer.asynchronous.queue_item import QueueItem
from jaxrlhf.trainer.loop import Loop
from jaxrlhf.workers.trained_model import TrainedWorker

APART = (Pool("policy", 1, ("actor",)), Pool("generation", 1, ("rollout", "reward")))


@dataclass(frozen=True)
class Death:
    """A moment of a step, counted from 1, at which the process is killed.

    Attributes:
      moment: `generate`, tokens of the collection that this step begins are sampled; `update`, a gradient of the actor
        is computed and not applied yet; `log`, the step is written down and not saved; `write`, half of the responses
        that wait or continue is in its checkpoint; `commit`, that is complete but for its last rename.
      count: The so many-th time of the moment within the step.
    """

    moment: str
    step: int
    count: int = 1


@dataclass(frozen=True)
class Case:
    """A run, and how it dies again and again."""

    config: Config
    deaths: tuple[Death, ...]


FIVE = (Death("generate", 2, 3), Death("update", 3), Death("log", 4), Death("write", 4), Death("commit", 5))
"""Every moment once."""


def cases() -> dict[str, Case]:
    """By name."""
    grpo = replace(config_of(GRPO(responses_per_update=64)), devices=None)
    ppo = config_of(PPO(responses_per_update=64))
    ppo = replace(ppo, devices=None, checkpoint=replace(ppo.checkpoint, every_steps=1))
    with_critic = (Pool("policy", 1, ("actor", "critic")), APART[1])
    updates = Death("update", 4), Death("update", 5)
    return {
        "1 on two pools": Case(replace(grpo, pools=APART, rollout=replace(grpo.rollout, staleness=1)), updates),
        "1 put off": Case(replace(grpo, rollout=over(grpo.rollout, 1)), updates),
        "2 put off, two pools": Case(replace(ppo, pools=with_critic, rollout=over(ppo.rollout, 2)), FIVE),
        "4 on one pool": Case(
            replace(grpo, devices=1, rollout=replace(grpo.rollout, staleness=4)),
            (Death("write", 4),),
        ),
    }


def over(rollout: Rollout, staleness: int, **changes: str) -> Rollout:
    """Half as many groups again under way, whose responses end with any of some letters, so that lengths vary."""
    ends = replace(rollout.sampling, stop_tokens=("e", "a", "1"))
    how = {"staleness": staleness, "over_provision": 1.5, "max_response_tokens": 16, "decode_tokens_per_dispatch": 2}
    return replace(rollout, sampling=ends, **how, **changes)


def arm(death: Death, config: Config, workdir: Path) -> None:
    """Have this process killed at the moment, once the checkpoint before it is whole."""
    before = (death.step - 1) // config.checkpoint.every_steps * config.checkpoint.every_steps
    left, learning, collecting = death.count, 0, 0

    def reached(step: int) -> None:
        nonlocal left
        left -= step == death.step
        if left == 0:
            while before and not (workdir / "checkpoints" / f"step_{before}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def step(original: Callable, self: Loop, number: int, *args: object) -> object:
        nonlocal learning
        learning = number
        result = original(self, number, *args)
        if death.moment == "log":
            reached(number)
        return result

    def collected(original: Callable, self: OffPolicy, number: int, *args: object) -> object:
        nonlocal collecting
        collecting = number + 1 - self.config.steps_ahead
        return original(self, number, *args)

    def sampled(original: Callable, self: Engine) -> object:
        result = original(self)
        reached(collecting)
        return result

    def added(original: Callable, self: TrainedWorker, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        if self.role == "actor":
            reached(learning)
        return result

    def saved(original: Callable, self: QueueItem, directory: Path) -> None:
        original(self, directory)
        [file] = directory.iterdir()
        if learning == death.step and pickle.loads(file.read_bytes()):
            os.truncate(file, file.stat().st_size // 2)
            reached(learning)

    def renamed(event: str, args: tuple) -> None:
        if event == "os.rename" and os.path.basename(args[1]) == f"step_{death.step}":
            reached(death.step)

    hook(Loop, "_step", step)
    if death.moment == "generate":
        hook(OffPolicy, "_collected", collected)
        hook(Engine, "step", sampled)
    if death.moment == "update":
        hook(TrainedWorker, "gradient", added)
    if death.moment == "write":
        hook(QueueItem, "save", saved)
    if death.moment == "commit":
        sys.addaudithook(renamed)


def hook(owner: type, name: str, wrapped: Callable) -> None:
    """Replace a method by a function that is given the original one before all else."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapped(original, *args, **kwargs))


def ended(config: Config, workdir: Path, death: Death | None = None) -> tuple[int, int]:
    """Exit code of a run in a separate process (see `forked`), and the step of its last checkpoint."""
    code = forked(config, workdir, lambda: None if death is None else arm(death, config, workdir))
    whole = [path.name for path in workdir.glob("checkpoints/step_*") if "tmp" not in path.name]
    return code, max((int(name.removeprefix("step_")) for name in whole), default=0)


def main() -> None:
    """Cases of these names, or all, one after another."""
    folder, *names = sys.argv[1:]
    log.save_learning_curve = log.save_step_picture = lambda source, png, title: png
    assert not xla_bridge.backends_are_initialized(), "threads of a device do not survive a fork"
    gc.freeze()
    for name, case in cases().items():
        if name not in (names or [name]):
            continue
        own = Path(folder) / name
        own.mkdir()
        ends = [ended(case.config, own / "whole")]
        ends += [ended(case.config, own / "cut", death) for death in (*case.deaths, None)]
        (own / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
