"""Weighted sums of rewards, and unscorable rows."""

import logging
import threading
import time

import numpy as np
import pytest

from jaxrlhf import config
from jaxrlhf.rewards.parts import part_names
from jaxrlhf.rewards.scorer import Scorer

FUNCTIONS = """
import time


def length(prompt, response, answer, record):
    return len(response)


def noted(prompt, response, answer, record):
    with open(record["note"], "a") as file:
        file.write(f"{response}\\n")
    return len(response) + 10 * len(answer)


def moody(prompt, response, answer, record):
    if response == "raise":
        raise OSError("the verifier is down")
    if response == "hang":
        time.sleep(1000)
    return {"nan": float("nan"), "none": None}.get(response, 0.0)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def score(scorer: Scorer, responses: list[str], answer: str | None = "7", **settings):
    return scorer.score(["p"] * len(responses), responses, [answer] * len(responses), [{}] * len(responses), **settings)


def test_weighted_sum_with_each_part_unweighted(functions):
    rewards = config.Rewards(
        parts=(
            config.Gsm8kReward(method="flexible", weight=2.0),
            config.FormatReward(weight=0.5),
            config.FunctionReward(f"{functions}:length", weight=-0.25),
            config.ArithmeticReward(weight=0.0),
        )
    )
    seen = []
    with Scorer(rewards) as scorer:
        assert scorer.names == ["gsm8k", "format", "length", "arithmetic"]
        scores = score(scorer, ["#### 7", "7", "none"], progress=lambda done, total: seen.append((done, total)))
    np.testing.assert_array_equal(scores.parts["gsm8k"], np.float32([1, 1, 0]))
    np.testing.assert_array_equal(scores.parts["format"], np.float32([1, 0, 0]))
    np.testing.assert_array_equal(scores.parts["length"], np.float32([6, 1, 4]))
    np.testing.assert_array_equal(scores.parts["arithmetic"], np.float32([1, 0, 0]))
    np.testing.assert_allclose(scores.score_B, [2 + 0.5 - 1.5, 2 - 0.25, -1.0])
    assert scores.score_B.dtype == np.float32 and scores.scorable_B.all()
    assert seen[-1] == (12, 12)
    assert scorer.failures == [] and scorer.counts == {}


def test_failures_are_unscorable_counted_and_logged(functions, caplog):
    parts = (config.ArithmeticReward(), config.FunctionReward(f"{functions}:moody"))
    responses = ["#### 7", "raise", "hang", "nan", "none", "#### 8"]
    with Scorer(config.Rewards(parts=parts, workers=1, timeout_s=0.5)) as scorer, caplog.at_level(logging.WARNING):
        scores = score(scorer, responses)
        np.testing.assert_array_equal(scores.scorable_B, [True, False, False, False, False, True])
        np.testing.assert_array_equal(scores.score_B, np.float32([1, 0, 0, 0, 0, 0]))
        np.testing.assert_array_equal(np.isnan(scores.parts["moody"]), ~scores.scorable_B)
        assert scorer.counts == {"exception": 1, "timeout": 1, "not-finite": 1, "none": 1}
        assert [(failure.part, failure.index) for failure in scorer.failures] == [("moody", n) for n in (1, 2, 3, 4)]
        assert "'moody' failed on 4 of 6" in caplog.text and "the verifier is down" in caplog.text
        score(scorer, ["#### 7"])
        assert scorer.failures == [] and scorer.counts == {}


def test_a_part_of_no_weight_cannot_make_a_row_unscorable(functions):
    parts = (config.ArithmeticReward(), config.FunctionReward(f"{functions}:moody", weight=0.0))
    with Scorer(config.Rewards(parts=parts, workers=1)) as scorer:
        scores = score(scorer, ["nan", "#### 7"])
    assert scores.scorable_B.all()
    assert scorer.counts == {"not-finite": 1}
    np.testing.assert_array_equal(scores.score_B, np.float32([0, 1]))


def test_a_missing_reference_answer_is_unscorable_and_no_rows_have_no_scores():
    with Scorer(config.Rewards(workers=1)) as scorer:
        scores = score(scorer, ["#### 7"], answer=None)
        assert not scores.scorable_B.any() and scorer.counts == {"exception": 1}
        scores = score(scorer, [])
    assert scores.score_B.shape == scores.scorable_B.shape == scores.parts["arithmetic"].shape == (0,)


@pytest.fixture
def noting(functions, tmp_path):
    """Scorer whose function notes its responses, the record that names the file of notes, and the sorted notes."""
    note = tmp_path / "note"
    with Scorer(config.Rewards(parts=(config.FunctionReward(f"{functions}:noted"),))) as scorer:
        yield scorer, {"note": str(note)}, lambda: sorted(note.read_text().split()) if note.exists() else []


def until(reached) -> None:
    end = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_started_calls_are_not_made_again(noting):
    scorer, record, noted = noting
    scorer.open_batch()
    for response in ("a", "bb", "a", "elsewhere"):
        scorer.start("p", lambda response=response: response, "7", record)
    until(lambda: noted() == ["a", "a", "bb", "elsewhere"])
    responses = ["ccc", "a", "a", "bb", "a"]
    scores = scorer.score(["p"] * 5, responses, ["7"] * 5, [record] * 5)
    np.testing.assert_array_equal(scores.score_B, np.float32([13, 11, 11, 12, 11]))
    assert noted() == ["a", "a", "a", "bb", "ccc", "elsewhere"]
    assert scorer.ahead == (3, 5)
    scorer.score(["p"], ["bb"], ["7"], [record])
    assert noted().count("bb") == 2 and scorer.ahead == (0, 1)


def test_a_started_call_is_found_only_if_all_inputs_are_equal(noting):
    scorer, record, noted = noting
    scorer.start("p", lambda: "a", "7", record)
    until(lambda: noted() == ["a"])
    records = [record, record, {**record, "more": 1}]
    scores = scorer.score(["p", "q", "p"], ["a"] * 3, ["77", "7", "7"], records)
    np.testing.assert_array_equal(scores.score_B, np.float32([21, 11, 11]))
    assert scorer.ahead == (0, 3) and noted() == ["a"] * 4


def test_old_batches_are_dropped(noting):
    scorer, record, noted = noting
    for batch in range(1, 6):
        scorer.open_batch()
        scorer.start("p", lambda batch=batch: "x" * batch, "7", record)
        until(lambda batch=batch: len(noted()) == batch)
    assert scorer.score(["p"] * 5, ["x" * n for n in range(1, 6)], ["7"] * 5, [record] * 5).scorable_B.all()
    assert scorer.ahead == (4, 5) and noted() == ["x", "x", "xx", "xxx", "xxxx", "xxxxx"]


def test_failures_of_started_calls_have_the_rows_of_their_responses(functions):
    parts = (config.FunctionReward(f"{functions}:moody"),)
    with Scorer(config.Rewards(parts=parts, workers=1, timeout_s=0.5)) as scorer:
        for response in ("nan", "raise", "fine", "hang"):
            scorer.start("p", lambda response=response: response, "7", {})
        scores = score(scorer, ["fine", "hang", "raise", "nan"])
    np.testing.assert_array_equal(scores.scorable_B, [True, False, False, False])
    found = [(failure.index, failure.cause) for failure in scorer.failures]
    assert found == [(1, "timeout"), (2, "exception"), (3, "not-finite")]


def test_texts_are_decoded_on_another_thread_and_a_failure_to_decode_is_left_to_score(noting):
    scorer, record, noted = noting
    threads = []

    def broken():
        threads.append(threading.get_ident())
        raise OSError("no text")

    scorer.start("p", broken, "7", record)
    scorer.start("p", lambda: "a", "7", record)
    until(lambda: noted() == ["a"])
    assert scorer.score(["p"], ["a"], ["7"], [record]).score_B == 11
    assert scorer.ahead == (1, 1) and threads != [threading.get_ident()]


def test_models_score_whole_responses():
    rewards = config.Rewards(parts=(config.ModelReward("org/judge", weight=0.5), config.ArithmeticReward()))
    texts = []

    def judge(triples):
        texts.extend(triples)
        return np.array([2.0, np.inf, -4.0], np.float32)

    with Scorer(rewards, models={"org/judge": judge}) as scorer:
        scores = score(scorer, ["#### 7", "a", "b"], finished=[True, False, True])
        assert texts == [("p", "#### 7", True), ("p", "a", False), ("p", "b", True)]
        np.testing.assert_array_equal(scores.score_B, np.float32([2.0, 0.0, -2.0]))
        np.testing.assert_array_equal(scores.scorable_B, [True, False, True])
        np.testing.assert_array_equal(scores.parts["judge"], np.float32([2.0, np.nan, -4.0]))
        with pytest.raises(ValueError, match=r"shape \(3,\) for 2 responses"):
            score(scorer, ["a", "b"])
    with pytest.raises(ValueError, match=r"org/judge.*models="):
        Scorer(rewards)


def test_sums_beyond_float32_are_unscorable(functions):
    parts = (config.FunctionReward(f"{functions}:length", weight=1e38),)
    with Scorer(config.Rewards(parts=parts, workers=1)) as scorer:
        scores = score(scorer, ["123", "1234"])
    np.testing.assert_array_equal(scores.scorable_B, [True, False])


def test_bad_input_is_refused_with_its_reason():
    with Scorer(config.Rewards(workers=1)) as scorer:
        with pytest.raises(ValueError, match="one prompt, response, answer"):
            scorer.score(["p"], ["a", "b"], [None], [{}])
        with pytest.raises(ValueError, match="got 1, 1, 1, 1 and 2"):
            scorer.score(["p"], ["a"], [None], [{}], finished=[True, False])
    with pytest.raises(ValueError, match="not a regular expression"):
        Scorer(config.Rewards(parts=(config.FormatReward(pattern="("),)))
    with pytest.raises(ValueError, match="no_such_module"):
        Scorer(config.Rewards(parts=(config.FunctionReward("no_such_module:f"),)))


def test_names_are_distinct():
    parts = [config.FunctionReward(f"m:{name}") for name in ("f_2", "f", "f", "format", "f")]
    assert part_names([*parts, config.FormatReward()]) == ["f_2", "f", "f_3", "format", "f_4", "format_2"]


def test_no_part_has_the_name_of_a_metric_of_the_total_score():
    parts = [config.FunctionReward("m:mean"), config.FunctionReward("m:mean"), config.ModelReward("org/std")]
    assert part_names(parts) == ["mean_2", "mean_3", "std_2"]
