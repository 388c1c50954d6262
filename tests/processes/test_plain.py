"""Messages of worker processes are decoded to the dataclasses that were sent, or refused."""

import json
import pickle

import pytest

from jaxrlhf.environments.protocol import About
from jaxrlhf.episode import CallRecord, Content, Observation
from jaxrlhf.processes.channel import Garbled
from jaxrlhf.processes.jobs import Answer, CodeFailure, Idle
from jaxrlhf.processes.plain import dumps, loads, read

SAID = [{"role": "user", "content": [{"type": "text", "text": "é\x00"}], "extra": {"n": [1, 2.5, None, True]}}]


@pytest.mark.parametrize(
    "message",
    [
        Observation(SAID, 1.5, False, True, ("a", 2, (b"x", None)), {"m": 2.0}, 5, [CallRecord("f", 0.5, "timeout")]),
        About(({"type": "function"},), True, frozenset({"a", "b"})),
        Answer(0, None, CodeFailure("crash", "why")),
        Answer(1, SAID[0]["content"], None, 2.0),
        Idle("spoilt"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_are_decoded_as_they_were_encoded(message):
    assert loads(dumps(message), (type(message), CodeFailure)) == message


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((value, float | None) for value in ("1", True, [1.0], {}, float("nan"), float("inf"), 10**400)),
        *((value, Content) for value in (1, None, {}, ["text"])),
        *((value, Observation) for value in (None, [], {}, {"reward": 1.0})),
    ],
    ids=str,
)
def test_values_of_other_types_are_refused(value, kind):
    with pytest.raises(Garbled):
        read(json.loads(json.dumps(value)), kind)


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"oops", b"[]", b'["Idle"]', b'["Idle", {}]', b'["Idle", null]', b'["Idle", {"spoilt": "", "more": 1}]'),
        *(b"[" * 100_000, b"\xff", b"9" * 10_000, dumps(CodeFailure("crash", "")), pickle.dumps(Idle())),
    ],
    ids=lambda message: repr(message[:40]),
)
def test_other_bytes_are_not_a_message(message):
    with pytest.raises(Garbled):
        loads(message, (Idle, Answer))


def test_a_failure_has_one_of_the_causes():
    with pytest.raises(Garbled):
        loads(b'["CodeFailure", {"cause": "fun", "detail": ""}]', (CodeFailure,))


def test_the_detail_of_a_failure_is_one_line_of_limited_length():
    found = loads(
        json.dumps(["CodeFailure", {"cause": "crash", "detail": "two\nlines " * 10**5}]).encode(), (CodeFailure,)
    )
    assert found.detail.startswith("two lines two lines") and "\n" not in found.detail and len(found.detail) == 1000


def test_a_state_contains_no_mapping():
    message = json.loads(dumps(Observation(SAID, state=("a",))))
    message[1]["state"] = [{"a": 1}]
    with pytest.raises(Garbled):
        loads(json.dumps(message).encode(), (Observation,))
