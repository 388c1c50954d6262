"""Tools that come as examples answer as their demonstrations say, and their questions cannot be known by heart."""

import pytest

from jaxrlhf.config import load
from jaxrlhf.data.generated import generated_records
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Reply, ToolCall

LIMIT_S = 60.0


def records(config, split, count):
    return [row.record for row in generated_records(config.data.function, split, count, 0)]


@pytest.mark.parametrize("name", ["tools_python", "tools_retrieval"])
def test_tools_answer_as_the_demonstrations_say(name):
    config = load(name)
    demonstrations = [
        each["solution"] for each in records(config, "train", 100) if not isinstance(each["solution"], str)
    ]
    assert 15 < len(demonstrations) < 55, "some call"
    with EnvironmentPool((config.environment,)) as pool:
        for number, messages in enumerate(demonstrations[:6]):
            pool.start(number, 0, {"prompt": "?"}, 0).result(LIMIT_S)
            for asked, answered in zip(messages[:-1:2], messages[1::2], strict=True):
                function = asked["tool_calls"][0]["function"]
                reply = Reply("", "", calls=(ToolCall(function["name"], function["arguments"]),))
                [told] = pool.step(number, reply).result(LIMIT_S).messages
                assert told["content"] == answered["content"]


def test_answers_of_held_out_questions_are_found_in_two_steps_and_trained_on_in_none():
    config = load("tools_retrieval")
    trained, held_out = (records(config, split, 400) for split in ("train", "evaluation"))
    assert not {each["prompt"] for each in trained} & {each["prompt"] for each in held_out}
    assert not {each["answer"] for each in trained} & {each["answer"] for each in held_out}
    for record in held_out:
        if not isinstance(record["solution"], str):
            _, first, second_call, second, said = record["solution"]
            subject = record["prompt"].split()[-1].removesuffix("?")
            between = second_call["tool_calls"][0]["function"]["arguments"]["query"].split()[-1]
            assert first["content"].startswith(f"a {subject} {between}")
            assert second["content"].startswith(f"b {between} {record['answer']}")
            assert said["content"] == f"#### {record['answer']}"
