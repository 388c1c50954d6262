"""Arrivals of episodes, step by step: recorded by one run, and replayed by another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.config import Config, Refusal
from jaxrlhf.data import Loader
from jaxrlhf.dataflows.batches.in_flight import ArrivedRound
from jaxrlhf.tracking.files import ARRIVALS
from jaxrlhf.tracking.records import RecordFile, read_records
from jaxrlhf.trainer.failures import writing

Rounds = Sequence[ArrivedRound]
"""Rounds of one step; more than one with dynamic sampling."""


class ArrivalFile:
    """File `arrivals.jsonl` of a run, with one line per step.

    Attributes:
      kept: Number of steps whose lines are kept, because the resumed checkpoint contains their arrivals. Later lines
        are from a run that was killed, and are removed.
    """

    def __init__(self, config: Config, loader: Loader) -> None:
        self._path, self._identity = config.folder / ARRIVALS, _identity(config, loader)
        self._file: RecordFile | None = None
        self.kept = 0

    def append(self, step: int, rounds: Rounds) -> None:
        """Write the rounds of a step, 0 for the first; the line survives a kill of the process."""
        with writing(self._path):
            self._file = self._file or RecordFile(self._path, resumed_step=self.kept or None)
            self._file.append([{"step": step + 1, **self._identity, "rounds": [_written(one) for one in rounds]}])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_arrivals(config: Config, loader: Loader) -> Sequence[Rounds] | None:
    """Read the rounds of every step from `rollout.replay_arrivals`; None if the setting is None.

    Raises:
      Refusal: The file cannot be read, is this run's own file, is of a run with other settings, or has too few steps.
    """
    if (given := config.rollout.replay_arrivals) is None:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise Refusal(
            f"rollout.replay_arrivals={given!r} is no file; give the {ARRIVALS} in the workdir of a run with "
            "rollout.order='arrival'"
        )
    if path.resolve() == (config.folder / ARRIVALS).resolve():
        raise Refusal(
            f"rollout.replay_arrivals={given!r} is the file that this run writes; choose another workdir, or drop "
            "replay_arrivals to go on by the clock"
        )
    steps: list[Rounds] = []
    for record in read_records(path):
        _check(record, path, len(steps) + 1, _identity(config, loader))
        try:
            steps.append([_read(one, config.rollout.responses_per_prompt) for one in record["rounds"]])
        except (KeyError, TypeError, ValueError) as error:
            raise Refusal(
                f"{path}, step {len(steps) + 1}, has no rounds of arrivals as {ARRIVALS} has them ({error!r}); give "
                "that of a run as it was written"
            ) from error
    if len(steps) < config.steps:
        raise Refusal(
            f"{path} has the arrivals of {len(steps)} steps, and this run has steps={config.steps}; lower steps to "
            f"{len(steps)}, or give the arrivals of a longer run"
        )
    return steps


def _identity(config: Config, loader: Loader) -> dict[str, Any]:
    """Return the settings that determine which groups are in flight in a step."""
    data, rollout = loader.state(), config.rollout
    return {
        "seed": data["seed"],
        "problems": data["problems"],
        "records": data["records"],
        "prompts_per_step": rollout.prompts_per_step,
        "responses_per_prompt": rollout.responses_per_prompt,
        "groups_under_way": rollout.groups_under_way,
        "staleness": rollout.staleness,
        "steps_ahead": config.steps_ahead,
    }


def _check(record: dict[str, Any], path: Path, step: int, identity: dict[str, Any]) -> None:
    if record["step"] != step:
        raise Refusal(f"{path} has step {record['step']} where step {step} belongs; give the file as it was written")
    if other := [name for name, here in identity.items() if record.get(name) != here]:
        was, now = (", ".join(f"{name}={values.get(name)!r}" for name in other) for values in (record, identity))
        raise Refusal(
            f"{path}, step {step}, is of a run with {was}, and this one has {now}; replay it with the seed, data, "
            "pools and rollout that it had"
        )


def _written(one: ArrivedRound) -> dict[str, Any]:
    groups = [
        {"prompt": prompt, "begun": begun + 1, "versions": versions}
        for (prompt, begun), versions in one.arrived.items()
    ]
    return {"taken": one.taken, "arrived": groups}


def _read(one: dict[str, Any], copies: int) -> ArrivedRound:
    arrived = {}
    for group in one["arrived"]:
        versions = tuple(tuple(map(int, episode)) for episode in group["versions"])
        if len(versions) != copies:
            raise ValueError(f"a group of {len(versions)} episodes")
        arrived[int(group["prompt"]), int(group["begun"]) - 1] = versions
    return ArrivedRound(arrived, tuple(one["taken"]))
