"""The file of arrivals: what a run writes is what another reads, and no other run's."""

import json
from dataclasses import replace

import pytest
from made_steps import problem

from jaxrlhf.config import GRPO, Arithmetic, Config, Environment, FromScratch, Rollout
from jaxrlhf.data import Loader
from jaxrlhf.dataflows.batches.in_flight import ArrivedRound
from jaxrlhf.trainer.asynchronous.arrivals import ArrivalFile, read_arrivals

STEPS = [
    [ArrivedRound({(3, 0): ((0, 0), (0,)), (1, 0): ((0,), ())}, (3, 1))],
    [ArrivedRound({(2, 0): ((0, 1), (1,))}, (2,)), ArrivedRound({(5, 1): ((1,), (1,))}, (5,))],
]
"""Arrivals of two steps, the second of two rounds."""


def config_of(folder, *, replayed=None, seed=0, steps=2, **rollout) -> Config:
    how = {"prompts_per_step": 2, "responses_per_prompt": 2, "staleness": 1, "over_provision": 1.5, "order": "arrival"}
    return Config(
        name="made",
        workdir=str(folder),
        algorithm=GRPO(responses_per_update=4),
        steps=steps,
        seed=seed,
        model=FromScratch(),
        data=Arithmetic(),
        environment=Environment(factory="made:Talks"),
        rollout=Rollout(**how | rollout, replay_arrivals=None if replayed is None else str(replayed)),
    )


def loader_of(config: Config, *, count: int = 8, fingerprint: str = "some"):
    problems = [problem(number) for number in range(count)]
    return Loader(problems, per_step=2, seed=config.seed, fingerprint=fingerprint)


def write(config: Config, steps=STEPS, *, first: int = 0, kept: int = 0):
    """Have a run write steps from a first one on; returns its file."""
    file = ArrivalFile(config, loader_of(config))
    file.kept = kept
    for index, rounds in enumerate(steps, start=first):
        file.append(index, rounds)
    file.close()
    return config.folder / "arrivals.jsonl"


@pytest.fixture
def written(tmp_path):
    return write(config_of(tmp_path / "before"))


def read(folder, replayed, *, count: int = 8, fingerprint: str = "some", **changes):
    config = config_of(folder, replayed=replayed, **changes)
    return read_arrivals(config, loader_of(config, count=count, fingerprint=fingerprint))


def test_another_run_reads_what_was_written(written, tmp_path):
    assert read(tmp_path / "after", written) == STEPS
    assert read(tmp_path / "after", written, steps=1) == STEPS, "a shorter run takes the first of them"
    assert read(tmp_path / "after", None) is None
    first = json.loads(written.read_text().splitlines()[0])
    assert first["rounds"][0]["taken"] == [3, 1]
    assert first["rounds"][0]["arrived"][0] == {"prompt": 3, "begun": 1, "versions": [[0, 0], [0]]}


def test_a_run_that_goes_on_writes_behind_what_its_checkpoint_holds(written):
    config = config_of(written.parent)
    whole = written.read_text()
    with open(written, "a") as file:
        file.write('{"step": 3, "torn')
    write(config, STEPS[1:], first=1, kept=1)
    assert written.read_text() == whole
    write(config, STEPS[:1])
    assert written.read_text() == whole.splitlines(keepends=True)[0], "one that begins anew keeps nothing"


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"fingerprint": "others"},
        {"count": 9},
        {"prompts_per_step": 3, "responses_per_prompt": 4, "over_provision": 2.0},
        {"staleness": 2},
        {"steps": 3},
    ],
    ids=["seed", "records", "problems", "sizes", "staleness", "too short"],
)
def test_arrivals_of_another_run_are_refused(changes, written, tmp_path, refused):
    with refused():
        read(tmp_path / "after", written, **changes)


def test_what_is_no_file_of_arrivals_is_refused(written, tmp_path, refused):
    with refused():
        read(tmp_path / "after", tmp_path / "nowhere.jsonl")
    with refused():
        read(written.parent, written)
    record = json.loads(written.read_text().splitlines()[0])
    for wrong in (
        {**record, "step": 2},
        {**record, "rounds": [{"taken": [3]}]},
        {**record, "rounds": [{"taken": [3], "arrived": [{"prompt": 3, "begun": 1, "versions": [[0]]}]}]},
    ):
        damaged = tmp_path / "damaged.jsonl"
        damaged.write_text(json.dumps(wrong) + "\n")
        with refused():
            read(tmp_path / "after", damaged)


def test_a_run_without_an_order_of_arrival_replays_none(refused):
    arrival = config_of("runs/made")
    with refused():
        replace(arrival, rollout=replace(arrival.rollout, order="deterministic", replay_arrivals="a.jsonl"))
