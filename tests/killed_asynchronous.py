"""Runs at a staleness: each whole, and each killed twice and gone on with.

    python killed_asynchronous.py FOLDER

Folders and ends are those of `killed_runs.py`.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

from jax._src import xla_bridge
from killed_runs import Case, config_of, forked

from jaxrlhf.config import GRPO, PPO, Pool, Rollout
from jaxrlhf.trainer import log

APART = (Pool("policy", 1, ("actor",)), Pool("generation", 1, ("rollout", "reward")))


def cases() -> dict[str, Case]:
    """By name; gradients are counted in the first of the runs that die, and one fewer in each further one."""
    grpo = replace(config_of(GRPO(responses_per_update=64)), devices=None)
    ppo = config_of(PPO(responses_per_update=64))
    return {
        "1 on two pools": Case(replace(grpo, pools=APART, rollout=replace(grpo.rollout, staleness=1)), gradients=4),
        "in parts on two pools": Case(replace(grpo, pools=APART, rollout=in_parts(grpo.rollout)), gradients=14),
        "4 on one pool": Case(replace(ppo, rollout=replace(ppo.rollout, staleness=4)), gradients=4),
        "1 put off": Case(replace(ppo, rollout=over(ppo.rollout, 1)), gradients=4),
        "2 put off, two pools": Case(replace(grpo, pools=APART, rollout=over(grpo.rollout, 2)), gradients=3),
        "1 put off and kept": Case(replace(grpo, rollout=over(grpo.rollout, 1, on_new_weights="keep")), gradients=4),
    }


def over(rollout: Rollout, staleness: int, **changes: str) -> Rollout:
    """Half as many groups again under way, whose responses end with any of some letters, so that lengths vary."""
    ends = replace(rollout.sampling, stop_tokens=("e", "a", "1"))
    how = {"staleness": staleness, "over_provision": 1.5, "max_response_tokens": 16, "decode_tokens_per_dispatch": 2}
    return replace(rollout, sampling=ends, **how, **changes)


def in_parts(rollout: Rollout) -> Rollout:
    """A step of which a quarter is learnt from as soon as that is complete, at no staleness."""
    return replace(over(rollout, 0), over_provision=1.0, stream_parts=4)


def main() -> None:
    """All cases, one after another."""
    folder, *names = sys.argv[1:]
    log.save_learning_curve = log.save_step_picture = lambda source, png, title: png
    assert not xla_bridge.backends_are_initialized(), "threads of a device do not survive a fork"
    gc.freeze()
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
