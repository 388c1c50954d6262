"""Checkpoints of a run: how often, and which are kept."""

from dataclasses import dataclass

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
      keep_best: Checkpoints of the highest `eval/accuracy` kept beside them, for which they have to fall on evaluated
        steps. None is 1 if they do, else 0.
    """

    every_steps: NotNegative[int] | None = None
    keep_last: Positive[int] = 2
    keep_best: NotNegative[int] | None = None

    def filled_in(self, evaluated: int) -> "Checkpointing":
        """These settings without None, for a run that evaluates every so many steps; 0 is at its ends alone."""
        saved = self.every_steps
        if saved is None:
            saved = _CHECKPOINT_STEPS if evaluated == 0 else -(-_CHECKPOINT_STEPS // evaluated) * evaluated
        ranked = saved == 0 or evaluated == 0 or saved % evaluated == 0
        best = int(ranked) if self.keep_best is None else self.keep_best
        return Checkpointing(saved, self.keep_last, best)
