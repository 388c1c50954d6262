"""Rewards for tags, length and repetitions."""

import itertools
import math

import pytest

from jaxrlhf import config
from jaxrlhf.rewards.formats import tags
from jaxrlhf.rewards.lengths import cosine_length, repetition
from jaxrlhf.rewards.scorer import Scorer

GOOD = "<think>a</think> <answer>b</answer>"


@pytest.mark.parametrize(
    ("response", "share"),
    [
        (GOOD, 1.0),
        (f"before {GOOD} after", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think>", 0.5),
        ("<answer>b</answer>", 0.5),
        ("<answer>b</answer><think>a</think>", 0.5),  # the second comes before the first
        ("<think><answer>b</answer></think>", 0.5),  # inside it
        ("<think>a</think><think>a</think><answer>b</answer>", 0.5),
        ("<think>a</think><answer>b", 0.5),
        ("</think>a<think><answer>b</answer>", 0.5),
        ("<think>a<answer>b", 0.0),
        ("<Think>a</Think>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_are_used_once_and_in_order(response, share):
    assert tags("", response, None, {}, names=("think", "answer")) == share


def test_repetition_is_the_share_of_repeated_sequences():
    assert repetition("", "one two three four", None, {}, words=2) == 0.0
    assert repetition("", "so so so so so", None, {}, words=2) == pytest.approx(-3 / 4)
    assert repetition("", "A b a B a", None, {}, words=2) == pytest.approx(-2 / 4)
    assert repetition("", "two words", None, {}, words=3) == 0.0
    assert repetition("", "", None, {}, words=1) == 0.0


@pytest.mark.parametrize("words", [1, 2, 3, 5])
def test_repetition_equals_a_naive_count(words):
    for text in itertools.product("ab", repeat=7):
        seen, again = [], 0
        for start in range(7 - words + 1):
            again += text[start : start + words] in seen
            seen.append(text[start : start + words])
        assert repetition("", " ".join(text), None, {}, words=words) == pytest.approx(-again / len(seen))


def paid(length: int, right: bool) -> float:
    settings = {"max_characters": 100, "right": (2.0, 1.0), "wrong": (-10.0, 0.0), "too_long": -7.0}
    return cosine_length("", "x" * length, None, {}, correct=lambda *_: float(right), **settings)


def test_cosine_length_favors_short_right_answers_and_long_wrong_ones():
    assert (paid(0, True), paid(0, False)) == (2.0, -10.0)
    assert (paid(50, True), paid(50, False)) == pytest.approx((1.5, -5.0))
    assert (paid(100, True), paid(100, False), paid(1000, True)) == (-7.0, -7.0, -7.0)
    third = math.sqrt(3) / 2  # the cosine of 30 degrees, at a sixth of the length
    assert cosine_length(
        *("", "x" * 10, None, {}),
        **{"correct": lambda *_: 1.0, "max_characters": 60, "right": (1.0, 0.0), "wrong": (0.0, 0.0), "too_long": 0.0},
    ) == pytest.approx((1 + third) / 2)
    rights, wrongs = zip(*((paid(length, True), paid(length, False)) for length in range(100)), strict=True)
    assert list(rights) == sorted(rights, reverse=True) and list(wrongs) == sorted(wrongs)
    assert min(rights) > 1.0 and max(wrongs) < 0.0


def test_cosine_length_runs_in_the_pool_with_its_inner_reward(tmp_path):
    (tmp_path / "mine.py").write_text("def right(prompt, response, answer, record): return response[0] == answer\n")
    mine = config.FunctionReward(f"{tmp_path / 'mine.py'}:right")
    parts = (
        config.CosineLengthReward(max_characters=1000),
        config.CosineLengthReward(max_characters=1000, correct=mine, right=(3.0, 3.0), wrong=(-3.0, -3.0)),
        config.TagsReward(weight=0.5),
        config.RepetitionReward(words=1, weight=2.0),
    )
    with Scorer(config.Rewards(parts=parts)) as scorer:
        assert scorer.names == ["cosine_length", "cosine_length_2", "tags", "repetition"]
        scores = scorer.score(["p"] * 2, ["7 7 #### 7", GOOD], ["7", "7"], [{}, {}])
    assert scores.parts["cosine_length_2"].tolist() == [3.0, -3.0]
    assert scores.parts["cosine_length"][0] == pytest.approx(1.0, abs=0.01)
    assert scores.parts["cosine_length"][1] == pytest.approx(-1.0, abs=0.01)
    assert scores.score_B[0] == pytest.approx(scores.parts["cosine_length"][0] + 3.0 + 2.0 * -0.5)
    assert scores.score_B[1] == pytest.approx(scores.parts["cosine_length"][1] - 3.0 + 0.5)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (config.CosineLengthReward, {"max_characters": 0}, "max_characters must be above 0"),
        (config.CosineLengthReward, {"max_characters": 9, "wrong": (1.0, math.inf)}, "wrong must be .*each finite"),
        (config.CosineLengthReward, {"max_characters": 9, "correct": config.MathReward(weight=2.0)}, "has no effect"),
        (config.CosineLengthReward, {"max_characters": 9, "too_long": math.nan}, "too_long must be finite"),
        (config.TagsReward, {"names": ()}, "names must be one or more, each non-empty"),
        (config.RepetitionReward, {"words": 0}, "words must be above 0"),
    ],
)
def test_meaningless_settings_are_refused(part, settings, message):
    with pytest.raises(ValueError, match=message):
        part(**settings)


def test_an_inner_function_that_does_not_load_is_refused_at_the_start():
    parts = (config.CosineLengthReward(max_characters=9, correct=config.FunctionReward("no_such_module:f")),)
    with pytest.raises(ValueError, match="no_such_module"):
        Scorer(config.Rewards(parts=parts))
