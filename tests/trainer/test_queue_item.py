"""Responses that wait in a checkpoint: read back as they were, and never as a program."""

import os
import pickle
import sys
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple
from zoneinfo import ZoneInfo

import jax
import numpy as np
import pytest

from jaxrlhf.batch import Sequences
from jaxrlhf.config import Refusal
from jaxrlhf.episode import ShownImage
from jaxrlhf.trainer.asynchronous.queue_item import QueueItem


@dataclass
class Renamed:
    """A dataclass whose constructor must not be called when an object is read back."""

    numbers: object = None

    def __post_init__(self):
        assert self.numbers is not None, "the constructor is not called"


class Columns(NamedTuple):
    first: np.ndarray
    second: object


class Undeclared:
    """A class whose objects may hold anything."""


def algorithm() -> object:
    """Settings of an algorithm that this file defines."""
    return type("Own", (), {"__module__": __name__})()


def test_what_waits_is_read_back_without_its_constructors(tmp_path, monkeypatch):
    url = "data:image/png;base64,AAAA"
    value = {
        "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.ones((2, 2), np.float32)[:, 0], np.float64(0.5)],
        "objects": np.array([("a", 1), None], object),
        "on a device": jax.numpy.arange(3.0),
        "record": {"when": datetime(2026, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")), "price": Decimal("1.10"), 3: {1, 2}},
        "own": [Renamed(numbers=5), Columns(np.zeros(2), (b"x", None))],
        "image": ShownImage.of(url),
    }
    taken: list[dict] = []
    item = QueueItem(lambda: value, taken.append, algorithm=algorithm())
    item.save(tmp_path)
    monkeypatch.setattr(Renamed, "__post_init__", None)
    item.restore(tmp_path)
    [found] = taken
    assert repr(found | {"image": found["image"].load()}) == repr(
        value | {"image": url, "on a device": np.arange(3.0, dtype=np.float32)}
    )
    assert [one.dtype for one in found["arrays"]] == [one.dtype for one in value["arrays"]]


@pytest.mark.parametrize(
    "held",
    [Undeclared(), len, os.system, Undeclared, algorithm],
    ids=lambda held: getattr(held, "__name__", "an instance"),
)
def test_what_could_not_be_read_again_is_not_saved(tmp_path, held):
    item = QueueItem(lambda: [held], print, algorithm=algorithm())
    with pytest.raises(Refusal, match=r"cannot hold a .*\.(Undeclared|len|system|algorithm);"):
        item.save(tmp_path)


class Executed:
    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


HERE = "jaxrlhf.trainer.asynchronous.queue_item"
PROGRAMS = {  # pickles that call a function, build another class, or find a function through another object
    "os": lambda note: pickle.dumps(Executed(os.mkdir, note)),
    "eval": lambda note: pickle.dumps(Executed(eval, f"__import__('os').mkdir({note!r})")),
    "getattr": lambda note: pickle.dumps(Executed(getattr, "", "join")),
    "constructor": lambda note: pickle.dumps(Executed(Renamed, 5)),
    "subclass": lambda note: pickle.dumps(Undeclared()),
    "dots": lambda note: b"\x80\x04\x8c%s\x8c\x11sys.modules.clear\x93)R." % (bytes([len(HERE)]) + HERE.encode()),
    "a function of the file": lambda note: b"c%s\nsettled\n(K\x01tR." % HERE.encode(),
    "no pickle": lambda note: b"\x80\x04oops",
    "nothing": lambda note: b"",
    "deep": lambda note: b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_changed_item_runs_nothing(tmp_path, program):
    taken: list[object] = []
    note, modules = tmp_path / "executed", len(sys.modules)
    (tmp_path / "collected.pickle").write_bytes(PROGRAMS[program](str(note)))
    with pytest.raises(Refusal, match="queued responses were saved by a different version") as refused:
        QueueItem(list, taken.append, algorithm=algorithm()).restore(tmp_path)
    assert not note.exists() and not taken and len(sys.modules) >= modules
    assert "\n" not in str(refused.value)


def test_what_waits_and_was_saved_by_other_code_is_refused(tmp_path, monkeypatch):
    taken: list[object] = []
    item = QueueItem(lambda: [Renamed(numbers=1)], taken.append, algorithm=algorithm())
    item.save(tmp_path)
    monkeypatch.delattr(sys.modules[__name__], "Renamed")
    with pytest.raises(Refusal, match=r"saved by a different version of the code .*Renamed"):
        item.restore(tmp_path)
    assert not taken


def test_what_waits_without_a_field_that_there_is_now_is_refused(tmp_path):
    taken: list[object] = []
    sequences = Sequences(*np.zeros((2, 1, 1), np.int32), np.ones((1, 1), bool), np.zeros(1, np.int64))
    del sequences.__dict__["recorded"]  # as in a checkpoint of before
    item = QueueItem(lambda: [(sequences,)], taken.append, algorithm=algorithm())
    (tmp_path / "collected.pickle").write_bytes(pickle.dumps([(sequences,)]))
    with pytest.raises(Refusal, match=r"saved by a different version of the code .*recorded"):
        item.restore(tmp_path)
    assert not taken
