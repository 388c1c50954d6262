"""Mixtures of sources: problems of a step, selection, and rewards."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jaxrlhf.batch import Problem
from jaxrlhf.config import (
    ArithmeticReward,
    EvaluationSet,
    FormatReward,
    Gsm8kReward,
    Mixture,
    PromptFile,
    Refusal,
    Rewards,
    Selection,
    Source,
)
from jaxrlhf.data.loader import Band, Loader, Part
from jaxrlhf.data.selection import mean_scores, selected
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.rewards.mathematics.stated import stated_answer
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.trainer.evaluation import majority


def problems(count):
    return [Problem(prompt_id=n, prompt=str(n), prompt_tokens=(n,)) for n in range(count)]


def mixed(per_step=10, **settings) -> Loader:
    """Return a loader of 60 problems of weight 3 and 40 of weight 1."""
    parts = [Part(np.arange(60), 3.0, "a"), Part(np.arange(60, 100), 1.0, "b")]
    return Loader(problems(100), per_step=per_step, seed=3, parts=parts, **settings)


def ids(loader, batches):
    return [[problem.prompt_id for problem in loader.next()] for _ in range(batches)]


def test_a_step_takes_from_each_source_in_proportion_to_its_weight():
    batches = ids(mixed(), 40)
    small = [sum(number >= 60 for number in batch) for batch in batches]
    assert {len(set(batch)) for batch in batches} == {10}
    assert set(small) == {2, 3} and sum(small) == 100, "a quarter of 400, to the very problem"
    sampled = [number for batch in batches for number in batch if number < 60]
    assert sorted(sampled[:60]) != [*range(60)] or len(set(sampled[:54])) == 54, "each source has epochs of its own"
    assert all(sampled.count(number) in (4, 5, 6) for number in range(60))


def test_a_mixture_resumes_where_it_was_saved():
    whole = mixed()
    before = ids(whole, 17)
    saved = json.loads(json.dumps(whole.state()))
    after, again = ids(whole, 30), mixed()
    again.restore(saved)
    assert ids(again, 30) == after and before != after
    with pytest.raises(Refusal, match="2 sources"):
        Loader(problems(100), per_step=10, seed=3).restore(saved)


def test_a_source_must_have_enough_problems_for_a_step():
    with pytest.raises(Refusal, match="source 'b'"):
        parts = [Part(np.arange(97), 1.0, "a"), Part(np.arange(97, 100), 1.0, "b")]
        Loader(problems(100), per_step=10, seed=3, parts=parts)


def test_problems_outside_of_the_band_are_left_out_of_the_next_epoch():
    loader = Loader(problems(12), per_step=4, seed=3, band=Band(0.1, 0.9))
    assert sorted(np.ravel(ids(loader, 2)).tolist()) != list(range(8))
    first = ids(loader, 1)
    loader.observe({number: 0.0 if number % 2 else 0.5 for number in range(12) if number in loader._index_of})
    saved = json.loads(json.dumps(loader.state()))
    second = ids(loader, 1)
    assert all(number % 2 == 0 for number in second[0]), "six are left, of which four fill a step"
    loader.observe(dict.fromkeys(range(12), 1.0))
    within = loader.state()
    third = ids(loader, 2)
    assert sorted({number for batch in third for number in batch}) != [0, 2, 4, 6], (
        "none would be left, so all are back"
    )
    again = Loader(problems(12), per_step=4, seed=3, band=Band(0.1, 0.9))
    again.restore(saved)
    assert ids(again, 1) == second and first
    again.restore(json.loads(json.dumps(within)))
    assert ids(again, 2) == third


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


def test_sources_have_separate_system_prompts_environments_and_control_tokens(tmp_path, tokenizer):
    a = write(tmp_path / "a.jsonl", [{"prompt": "one<|eos|>", "answer": 1}, {"prompt": "two", "answer": 2}])
    b = write(tmp_path / "b.jsonl", [{"prompt": "three", "answer": 3}])
    sources = (
        Source(name="a", data=PromptFile(a, control_tokens="text"), environment="shop"),
        Source(name="b", data=PromptFile(b, evaluation=a), system_prompt="Think."),
    )
    how = {"max_prompt_tokens": 99, "system_prompt": "Be brief.", "environment_key": "world"}
    table = load_problems(Mixture(sources), tokenizer, split="train", **how).problems
    assert [(one.prompt_id, one.source, one.record.get("world")) for one in table] == [
        (0, "a", "shop"),
        (1, "a", "shop"),
        (2, "b", None),
    ]
    assert [one.prompt.partition("<|user|>")[0] for one in table] == [
        "<|system|>Be brief.",
        "<|system|>Be brief.",
        "<|system|>Think.",
    ]
    assert tokenizer.eos_token_id not in table[0].prompt_tokens
    assert table[2].question == "system: Think.\n\nuser: three"
    assert [(name, index.tolist()) for name, index in table.sources] == [("a", [0, 1]), ("b", [2])]
    alone = load_problems(Mixture(sources[1:]), tokenizer, split="train", **how).problems
    assert len({alone.fingerprint, table.fingerprint}) == 2
    held_out = EvaluationSet(name="c", data=PromptFile(b, evaluation=a))
    assert {one.source for one in load_problems(held_out, tokenizer, split="evaluation", **how).problems} == {"c"}


def test_a_selection_leaves_out_repeated_prompts_and_wrong_difficulty(tmp_path, tokenizer):
    asked = ["Tom has 3.", "tom  has 3. ", "Mia has 4.", "Ann has 5.", "Max has six."]
    data = PromptFile(write(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in asked]), answer_key=None)
    table = load_problems(data, tokenizer, split="train", max_prompt_tokens=99).problems
    every = np.arange(5)
    assert selected(table, every, Selection(unique=True)).kept.tolist() == [0, 2, 3, 4]
    scores = {0: (0, 1), 2: (0, 0), 3: (1, 1, 1, 0)}
    rows = [
        {"step": 1, "prompt": table[n].prompt, "score": score}
        for n, given in scores.items()
        for score in (*given, None)
    ]
    samples = write(tmp_path / "samples.jsonl", rows)
    banded = selected(table, every, Selection(unique=True, samples=samples))
    assert (banded.kept.tolist(), banded.repeated, banded.outside) == ([0, 3, 4], 1, 1)
    ordered = Selection(samples=samples, band=(0.0, 1.0), order="by_difficulty")
    assert selected(table, every, ordered).kept.tolist() == [3, 0, 2, 1, 4], "easy ones first, unknown ones last"
    by_length = selected(table, every, Selection(order="by_length")).kept.tolist()
    assert [len(table[n].prompt_tokens) for n in by_length] == sorted(len(one.prompt_tokens) for one in table)
    with pytest.raises(Refusal, match="widen the band"):
        selected(table, every[2:3], Selection(samples=samples))
    with pytest.raises(Refusal, match="no such file"):
        selected(table, every, Selection(samples=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize("score", ["high", float("nan"), [1.0]])
def test_scores_that_are_not_numbers_are_refused(tmp_path, score):
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"prompt": "p", "score": one}) + "\n" for one in (0.5, None, score)))
    with pytest.raises(Refusal, match=r"samples\.jsonl, line 3: 'score' must be a finite number, or null"):
        mean_scores(str(samples))


def test_the_order_of_an_epoch_may_be_the_given_one():
    loader = Loader(problems(6), per_step=2, seed=3, parts=[Part(np.array([5, 3, 1, 0]))], shuffle=False)
    assert ids(loader, 3) == [[5, 3], [1, 0], [5, 3]]


def test_the_last_problems_of_a_given_order_are_used():
    """With six problems in batches of four, the last two share a batch with the first two of the next epoch."""
    saved = None
    for batch in [[5, 3, 1, 0], [4, 2, 5, 3], [1, 0, 4, 2]] * 2:  # each by a run that was resumed
        part = Part(np.array([5, 3, 1, 0, 4, 2]))
        loader = Loader(problems(6), per_step=4, seed=3, parts=[part], shuffle=False)
        if saved is not None:
            loader.restore(saved)
        assert ids(loader, 1) == [batch]
        saved = json.loads(json.dumps(loader.state()))


def test_new_weights_count_from_the_resume_on():
    """The new weights set the shares of later batches; earlier shares are not compensated."""
    parts = [Part(np.arange(60), 1.0, "a"), Part(np.arange(60, 100), 1.0, "b")]
    before = Loader(problems(100), per_step=8, seed=3, parts=parts)
    ids(before, 30)
    now = Loader(problems(100), per_step=8, seed=3, parts=[replace(parts[0], weight=3.0), parts[1]])
    now.restore(json.loads(json.dumps(before.state())))
    assert [sum(one < 60 for one in batch) for batch in ids(now, 5)] == [6] * 5


def test_a_source_is_scored_by_its_own_rewards():
    own = {"b": (Gsm8kReward(weight=2.0), FormatReward(pattern="never", weight=1.0))}
    texts, answers, sources = ["#### 1", "#### 2", "#### 1", "#### 7"], ["1", "1", "1", "7"], ["a", "", "b", "b"]
    with Scorer(Rewards((ArithmeticReward(),)), sources=own) as scorer:
        assert scorer.names == ["arithmetic", "b/gsm8k", "b/format"]
        scorer.open_batch()
        scorer.start("p", lambda: texts[2], answers[2], {}, None, "b")
        scores = scorer.score(["p"] * 4, texts, answers, [{}] * 4, sources=sources)
        assert scorer.ahead[1] == 6, "two functions of a response of b, one of the others"
    assert scores.score_B.tolist() == [1.0, 0.0, 2.0, 2.0] and scores.scorable_B.all()
    assert np.isnan(scores.parts["arithmetic"]).tolist() == [False, False, True, True]
    assert np.isnan(scores.parts["b/gsm8k"]).tolist() == [True, True, False, False]


def test_the_most_frequent_answer_wins():
    texts = [
        "so \\boxed{\\frac{1}{2}}",
        "#### 3",
        "it is \\boxed{\\frac{1} {2}}",
        "I do not know",
        "#### 4",
        "5",
        "none",
        "5.0",
    ]
    scores = np.array([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    answers = [*map(stated_answer, texts)]
    assert majority(answers, scores) == 0.5
    assert majority(["4", "5", "5."], np.array([[0.0, 1.0, 1.0]])) == 1.0
    assert majority([None, None], np.zeros((1, 2))) == 0.0
    assert majority(["4", "5"], np.array([[1.0, 0.0]])) == 1.0, "the earliest of those that are as frequent"
    assert majority(["4", "5"], np.array([[np.nan, 0.5]])) == 0.5
