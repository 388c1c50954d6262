"""Messages of worker processes are read as the dataclasses that were sent, or not at all."""

import json
import pickle

import pytest

from jaxrlhf.environments.protocol import About, CodeFailure, FinalReward, InstanceClosed, ToolAnswer
from jaxrlhf.episode import CallRecord, Observation
from jaxrlhf.processes.channel import Garbled
from jaxrlhf.processes.plain import dumps, loads

SAID = [{"role": "user", "content": [{"type": "text", "text": "é\x00"}], "extra": {"n": [1, 2.5, None, True]}}]


@pytest.mark.parametrize(
    "message",
    [
        Observation(SAID, 1.5, False, True, ("a", 2, (b"x", None)), {"m": 2.0}, 5, [CallRecord("f", 0.5, "timeout")]),
        About(({"type": "function"},), True, frozenset({"a", "b"})),
        InstanceClosed(CodeFailure("crash", "why")),
        InstanceClosed(None),
        ToolAnswer(1, SAID[0]["content"], 2.0, "output"),
        FinalReward(None),
        FinalReward(3.0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive_as_they_were_sent(message):
    assert loads(dumps(message), (type(message), FinalReward)) == message


@pytest.mark.parametrize(
    "value",
    [
        *({}, {"reward": "1"}, {"reward": True}, {"reward": [1.0]}, {"reward": 1.0, "more": 1}, [1.0], None),
        *({"reward": float("nan")}, {"reward": float("inf")}, {"reward": 10**400}),
    ],
    ids=str,
)
def test_values_of_other_types_are_no_message(value):
    with pytest.raises(Garbled):
        loads(json.dumps(["FinalReward", value]).encode(), (FinalReward,))


@pytest.mark.parametrize(
    "message",
    [
        *(b"", b"oops", b"[]", b'["FinalReward"]', b"[" * 100_000, b"\xff", b'["FinalReward", {"reward": 1e999}]'),
        *(dumps(CodeFailure("crash", "")), pickle.dumps(FinalReward(1.0)), b"9" * 10_000),
    ],
    ids=lambda message: repr(message[:20]),
)
def test_other_bytes_are_no_message(message):
    with pytest.raises(Garbled):
        loads(message, (FinalReward,))


def test_a_failure_has_one_of_the_causes():
    with pytest.raises(Garbled):
        loads(b'["CodeFailure", {"cause": "fun", "detail": ""}]', (CodeFailure,))


def test_an_anchor_holds_no_mapping():
    message = json.loads(dumps(Observation(SAID, state=("a",))))
    message[1]["state"] = [{"a": 1}]
    with pytest.raises(Garbled):
        loads(json.dumps(message).encode(), (Observation,))
