"""Answers of a pool's hosts to one call."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.single_controller.ray.actor import Raised

GRACE_S = 3.0  # after a failure, for the other hosts' answers and for further deaths
DEATH_REPORT_S = 30.0  # for Ray's report of a death, after an exception that the death may have caused
POLL_S = 1.0


@dataclass
class Answers:
    """Answers by rank, in the order of arrival.

    Attributes:
      values: Results of the hosts that returned.
      raised: Exceptions of the hosts that raised.
      died: Ray's reasons for the hosts that died.
      missing: Ranks of the hosts that did not answer.
    """

    values: dict[int, Any] = field(default_factory=dict)
    raised: dict[int, Raised] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not (self.failed or self.missing)

    @property
    def failed(self) -> bool:
        return bool(self.raised or self.died)

    @property
    def lost_peer(self) -> bool:
        """True if all exceptions may only be consequences of the death of another host."""
        return bool(self.raised) and not self.died and all(raised.lost_peer for raised in self.raised.values())


def collect(references: Sequence[Any], *, deadline: float, ended: Callable[[], bool]) -> Answers:
    """Wait until every host has answered, or until some time after the first failure.

    Args:
      references: Ray's references to the answers, in order of rank.
      deadline: End of the wait while no host has failed, on the clock of `time.monotonic()`.
      ended: Returns True if the pool has ended, so that no host will answer.
    """
    import ray

    ranks = {reference: rank for rank, reference in enumerate(references)}
    answers = Answers()
    while ranks and not ended() and (left_s := deadline - time.monotonic()) > 0:
        done, _ = ray.wait(list(ranks), timeout=min(POLL_S, left_s), fetch_local=False)
        failed = answers.failed
        for reference in done:
            _take(reference, ranks.pop(reference), answers)
        if done and answers.failed:
            end = time.monotonic() + (DEATH_REPORT_S if answers.lost_peer else GRACE_S)
            deadline = min(deadline, end) if failed else end
    answers.missing = sorted(ranks.values())
    return answers


def _take(reference: Any, rank: int, answers: Answers) -> None:
    import ray

    try:
        value = ray.get(reference)
    except ray.exceptions.RayTaskError:  # an error of this package's actor itself
        raise
    except ray.exceptions.RayError as error:
        answers.died[rank] = _reason(error)
        return
    if isinstance(value, Raised):
        answers.raised[rank] = value
    else:
        answers.values[rank] = value


def _reason(error: Exception) -> str:
    """Return Ray's reason for a death, without Ray's table of identifiers and list of common causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    found, guesses, _ = " ".join(lines[1:] or lines).rpartition("Worker exit detail: ")[2].partition("Some common")
    return found + "It crashed or was killed (the kernel kills processes when memory runs out)." * bool(guesses)
