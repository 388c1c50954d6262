"""Settings of checkpoints, of per-token records, and of runs that stall."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import NotNegative, Positive, Settings

CHECKPOINT_STEPS = 20
"""Minimum number of steps between checkpoints, if the settings do not give a number."""


@dataclass(frozen=True)
class Checkpointing(Settings):
    """Checkpoints of a run.

    Attributes:
      every_steps: Steps between checkpoints; 0 saves only at the end, on SIGTERM and on Ctrl-C. None is 20, rounded up
        to a multiple of `evaluation.every_steps`.
      keep_last: Number of newest checkpoints that are kept.
      keep_best: Number of best checkpoints kept in addition to the newest: highest `eval/accuracy`, or lowest
        `eval/loss` if no answers are scored. Checkpoints can only be ranked if they fall on evaluated steps. None is 1
        if they do, else 0.
      on_damage: What a resumed run does if files of its newest checkpoint, or the metric of an older one, are damaged:
        `stop` names the damage, and `previous` moves the checkpoint aside and continues from the one before.
    """

    every_steps: NotNegative[int] | None = None
    keep_last: Positive[int] = 2
    keep_best: NotNegative[int] | None = None
    on_damage: Literal["stop", "previous"] = "stop"


@dataclass(frozen=True)
class TokenRecords(Settings):
    """Per-token records of some responses in `samples.jsonl`.

    Each token is recorded with the trainer's log-probability before the step's update and the difference to the
    sampler's.

    Attributes:
      responses: Number of responses or episodes recorded per step, starting with the first prompt; 0 records none.
      entropy: True also records the entropy of the distribution that each token was sampled from; this takes another
        forward pass of the actor over these responses before the update.
    """

    responses: NotNegative[int] = 8
    entropy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.responses > 0 or not self.entropy,
            "token_records.entropy=True requires recorded tokens, but token_records.responses=0; raise "
            "token_records.responses, or set token_records.entropy=False",
        )


@dataclass(frozen=True)
class Stall(Settings):
    """Report of a run in which nothing moves: no call of a role starts or ends, and no call reports progress.

    Attributes:
      after_s: Seconds without movement until the first report, and between reports; None reports nothing.
      then: What follows a report: `go_on` waits further, and `end` kills the processes of the run and exits with
        code 1, so that a scheduler can start the run again from its last checkpoint.
    """

    after_s: Positive[float] | None = 1800.0
    then: Literal["go_on", "end"] = "go_on"
