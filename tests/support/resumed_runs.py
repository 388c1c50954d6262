"""Runs algorithms that carry something from step to step: each whole, and again from the first checkpoint of that.

    python resumed_runs.py FOLDER [NAME ...]

FOLDER/NAME/whole and FOLDER/NAME/cut are the workdirs, FOLDER/NAME/ends.json says how the two runs ended. Each is a
fork of this process, which has imported everything and started no device.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import drafted
import further_roles
import tensorboardX  # noqa: F401 - runs import it, and with it torch where that is there: seconds of each
from jax._src import xla_bridge
from learning_run import learning
from placed_runs import cut_after
from tiny_runs import training

from jaxrlhf.config import (
    DAPO,
    GRPO,
    VAPO,
    Algorithm,
    ArithmeticPairs,
    Checkpointing,
    Config,
    Evaluation,
    Layout,
    Preference,
    RewardModel,
    Rewards,
    Sampling,
    Training,
)
from jaxrlhf.engine.speculation.choice import Speculation
from jaxrlhf.trainer import log
from jaxrlhf.trainer.run import run

STEPS = 6
SAVED_EVERY = 2


def cases() -> dict[str, Config]:
    """By name."""
    vapo = VAPO(responses_per_update=64, critic=training(), critic_warmup_steps=3, length_scale=1.0)
    return {
        "VAPO": config_of(vapo),  # the first checkpoint is before the policy trains
        "DAPO": config_of(DAPO(responses_per_update=64)),
        "rows over two devices": split_rows(config_of(GRPO(responses_per_update=64))),
        "drafts": with_drafts(config_of(GRPO(responses_per_update=64))),
        "RewardModel": config_of(RewardModel(pairs_per_update=8, critic=training())),
        "PRIME": replace(further_roles.config_of("PRIME"), steps=STEPS),
        "SafeRLHF": replace(further_roles.config_of("SafeRLHF"), steps=STEPS),
    }


def split_rows(config: Config) -> Config:
    """Return the configuration with the tokens of each row on two devices."""
    return replace(config, devices=2, actor=replace(config.actor, layout=Layout(context=2)))


def with_drafts(config: Config) -> Config:
    """Return the configuration with responses long enough to repeat themselves, few slots, and every draft verified."""
    Speculation._width = drafted.widest
    sizes = {"slots": 8, "max_response_tokens": 24, "decode_tokens_per_dispatch": 4}
    return replace(
        config,
        rollout=replace(config.rollout, **sizes, sampling=Sampling(temperature=0.5), speculation="auto"),
    )


def config_of(algorithm: Algorithm) -> Config:
    """Six steps on what `learning_run.py` learns, or on pairs."""
    tiny = replace(learning(GRPO), steps=STEPS, evaluation=Evaluation(every_steps=0, problems=8))
    tiny = replace(tiny, checkpoint=Checkpointing(every_steps=SAVED_EVERY, keep_last=3, keep_best=0))
    if not isinstance(algorithm, Preference):
        return replace(tiny, algorithm=algorithm)
    pairs = {
        "data": ArithmeticPairs(difficulty=1, train_problems=60, eval_problems=8),
        "rewards": Rewards(),
        "rollout": replace(tiny.rollout, max_response_tokens=24),
    }
    if isinstance(algorithm, RewardModel):
        pairs["actor"] = Training()  # it has none
    return replace(tiny, algorithm=algorithm, **pairs)


def forked(config: Config, workdir: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Exit code of a run in a separate process, which calls `prepare` first: 0, 1, or minus the signal."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        prepare()
        code = 0 if run(replace(config, workdir=str(workdir))).finished else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    """Cases of these names, or all, one after another."""
    folder, *names = sys.argv[1:]
    log.save_learning_curve = log.save_step_picture = lambda source, png, title: png  # seconds; others look at them
    assert not xla_bridge.backends_are_initialized(), "threads of a device do not survive a fork"
    gc.freeze()  # what is imported stays, and need not be looked at again
    for name, config in cases().items():
        if name not in (names or [name]):
            continue
        own = Path(folder) / name
        own.mkdir()
        ends = [forked(config, own / "whole")]
        ends += [forked(config, cut_after(SAVED_EVERY, own / "whole", own / "cut"))]
        (own / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
