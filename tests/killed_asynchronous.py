"""Runs at a staleness: each whole, and each killed twice and gone on with.

    python killed_asynchronous.py FOLDER

Folders and ends are those of `killed_runs.py`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from jax._src import xla_bridge
from killed_runs import Case, config_of, forked

from jaxrlhf.config import GRPO, PPO, Pool
from jaxrlhf.trainer import log

APART = (Pool("policy", 1, ("actor",)), Pool("generation", 1, ("rollout", "reward")))


def cases() -> dict[str, Case]:
    """By name; gradients are counted in the first of the runs that die, and one fewer in each further one."""
    grpo = replace(config_of(GRPO(responses_per_update=64)), devices=None)
    ppo = config_of(PPO(responses_per_update=64))
    return {
        "1 on two pools": Case(replace(grpo, pools=APART, rollout=replace(grpo.rollout, staleness=1)), gradients=4),
        "2 on two pools": Case(replace(grpo, pools=APART, rollout=replace(grpo.rollout, staleness=2)), gradients=3),
        "4 on one pool": Case(replace(ppo, rollout=replace(ppo.rollout, staleness=4)), gradients=4),
    }


def main() -> None:
    """All cases, one after another."""
    folder, *names = sys.argv[1:]
    log.save_learning_curve = log.save_step_picture = lambda source, png, title: png
    assert not xla_bridge.backends_are_initialized(), "threads of a device do not survive a fork"
    for name, case in cases().items():
        if name not in (names or [name]):
            continue
        own = Path(folder) / name
        own.mkdir()
        ends = [forked(case, own / "whole", dies=False), forked(case, own / "cut", dies=True)]
        ends += [forked(replace(case, gradients=case.gradients - 1), own / "cut", dies=True)]
        ends += [forked(case, own / "cut", dies=False)]
        (own / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
