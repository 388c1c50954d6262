"""Answers of the hosts of a pool to one call."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.single_controller.ray.actor import Raised

GRACE_S = 3.0  # after a failure, for the other hosts' answers and for deaths that follow
NEWS_S = 30.0  # for the news of a death, after an exception that may come from it
POLL_S = 1.0


@dataclass
class Answers:
    """Answers by rank, in the order of arrival.

    Attributes:
      died: Ray's reason, for hosts that died.
      missing: Ranks that did not answer.
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
        """True if hosts raised, but maybe only because another died."""
        return bool(self.raised) and not self.died and all(raised.lost_peer for raised in self.raised.values())


def collect(references: Sequence[Any], *, deadline: float, ended: Callable[[], bool]) -> Answers:
    """Wait until every host has answered, or one has failed and the others had a moment to follow.

    Args:
      references: Ray's references to the answers, in order of ranks.
      deadline: End of the wait while no host has failed, as `time.monotonic()`.
      ended: Returns true once there is nothing to wait for any more.
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
            enough = time.monotonic() + (NEWS_S if answers.lost_peer else GRACE_S)
            deadline = min(deadline, enough) if failed else enough
    answers.missing = sorted(ranks.values())
    return answers


def _take(reference: Any, rank: int, answers: Answers) -> None:
    import ray

    try:
        value = ray.get(reference)
    except ray.exceptions.RayTaskError:  # in this package's own part of a call
        raise
    except ray.exceptions.RayError as error:
        answers.died[rank] = _reason(error)
        return
    if isinstance(value, Raised):
        answers.raised[rank] = value
    else:
        answers.values[rank] = value


def _reason(error: Exception) -> str:
    """Ray's reason for a death, without its table of identifiers and its guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    found, guesses, _ = " ".join(lines[1:] or lines).rpartition("Worker exit detail: ")[2].partition("Some common")
    return found + "It was killed (the kernel does that when memory runs out), or it crashed." * bool(guesses)
