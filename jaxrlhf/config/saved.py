"""Settings of what a run saves: checkpoints, and what happened at single tokens."""

from dataclasses import dataclass

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import NotNegative, Positive, Settings

_CHECKPOINT_STEPS = 20
"""Steps between checkpoints, at least, where settings do not say."""


@dataclass(frozen=True)
class Checkpointing(Settings):
    """Checkpoints of a run.

    Attributes:
      every_steps: Steps between checkpoints; 0 saves only at the end, on SIGTERM and on Ctrl-C. None is 20, or the next
        multiple of `evaluation.every_steps`.
      keep_last: Newest checkpoints kept.
      keep_best: Checkpoints of the highest `eval/accuracy`, or where no answers are scored of the lowest `eval/loss`,
        kept beside them, for which they have to fall on evaluated steps. None is 1 if they do, else 0.
    """

    every_steps: NotNegative[int] | None = None
    keep_last: Positive[int] = 2
    keep_best: NotNegative[int] | None = None

    def check(self, evaluated: int) -> None:
        """Refuse to rank checkpoints of steps that a run that evaluates every so many steps does not evaluate."""
        saved = self.every_steps or 0
        ranked = (self.keep_best or 0) > 0 and saved > 0 and evaluated > 0
        require(
            not ranked or saved % evaluated == 0,
            f"checkpoint.every_steps={saved} is no multiple of evaluation.every_steps={evaluated}, so checkpoints "
            "would have nothing to rank them by; make it one, or set checkpoint.keep_best=0",
        )

    def filled_in(self, evaluated: int) -> "Checkpointing":
        """These settings without None, for a run that evaluates every so many steps; 0 is at its ends alone."""
        saved = self.every_steps
        if saved is None:
            saved = _CHECKPOINT_STEPS if evaluated == 0 else -(-_CHECKPOINT_STEPS // evaluated) * evaluated
        ranked = saved == 0 or evaluated == 0 or saved % evaluated == 0
        best = int(ranked) if self.keep_best is None else self.keep_best
        return Checkpointing(saved, self.keep_last, best)


@dataclass(frozen=True)
class TokenRecords(Settings):
    """Responses whose tokens `samples.jsonl` has one by one, each with the trainer's log-probability before the step's
    update and its difference to the sampler's.

    Attributes:
      responses: Responses or episodes of a step, from its first prompt on; 0 has none.
      entropy: With the entropy of the distribution that each token was drawn from, which is a further pass of the actor
        over these responses, before the update.
    """

    responses: NotNegative[int] = 8
    entropy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.responses > 0 or not self.entropy,
            "token_records.entropy is on and token_records.responses=0 has no tokens; name some responses, or drop it",
        )
