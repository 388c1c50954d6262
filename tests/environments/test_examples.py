"""Example tools give the answers of their demonstrations, and held-out questions need the tools."""

from functools import cache

import pytest

from jaxrlhf.config import load
from jaxrlhf.data.generated import generated_records
from jaxrlhf.environments.games import HigherLower
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Reply, ToolCall

LIMIT_S = 60.0


def records(config, split, count):
    return [row.record for row in generated_records(config.data.function, split, count, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tools_python", "tools_retrieval"])
def test_tools_give_the_answers_of_the_demonstrations(name):
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


def halving(left: str) -> str:
    low, high = map(int, left.split("-"))
    return str((low + high) // 2)


@pytest.mark.parametrize("highest, guesses", [(7, 3), (64, 7)])
def test_halving_finds_every_number_and_answers_show_the_remaining_range(highest, guesses):
    for secret in range(1, highest + 1):
        game, turns = HigherLower(), 0
        seen, done = game.reset({"prompt": f"1-{highest}", "answer": str(secret)}, 0).state, False
        while not done:
            assert turns < guesses
            told = game.step(Reply(halving(seen), ""))
            seen, done, turns = told.state, told.done, turns + 1
            assert done or [told.messages[0]["content"], told.reward] == [seen, 0.0]
        assert told.reward == 1.0


def test_invalid_guesses_leave_the_range_unchanged():
    game = HigherLower()
    game.reset({"prompt": "1-64", "answer": "20"}, 0)
    assert game.step(Reply("40", "")).state == "1-39"
    for said in ("", "x", "-1", "0", "40", "64", "3 4", "\u0665"):
        told = game.step(Reply(said, ""))
        assert (told.state, told.reward, told.done) == ("1-39", 0.0, False)


@cache
def found(numbers: int, guesses: int) -> float:
    """Return the share of secrets that random guesses in the remaining range find."""
    if not guesses or not numbers:
        return 0.0
    return sum(
        (1 + below * found(below, guesses - 1) + (numbers - 1 - below) * found(numbers - 1 - below, guesses - 1))
        for below in range(numbers)
    ) / (numbers * numbers)


def test_demonstrations_find_as_many_numbers_as_random_guesses_in_the_range():
    assert [found(64, 7), found(7, 3)] == pytest.approx([0.643, 0.678], abs=5e-4)
    played = records(load("game_higher_lower"), "train", 4000)
    wins = 0
    for record in played:
        game = HigherLower()
        game.reset(record, 0)
        messages = [{"role": "user", "content": record["prompt"]}, *record["solution"]]
        for asked, said, answer in zip(messages[::2], messages[1::2], [*messages[2::2], None], strict=True):
            assert (asked["role"], said["role"]) == ("user", "assistant")
            told = game.step(Reply(said["content"], said["content"]))
            assert answer is None or told.messages[0]["content"] == answer["content"]
        wins += told.done
    assert wins / len(played) == pytest.approx(0.678, abs=0.03)
