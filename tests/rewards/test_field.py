"""Reward errors that users of other frameworks reported: thinking, thousands, judges, votes, spreads."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algos.advantages import group_relative
from jaxrlhf.config import ArithmeticReward, CodeReward, Gsm8kReward, JudgeReward, MathReward, Rewards
from jaxrlhf.rewards.answers import gsm8k
from jaxrlhf.rewards.endpoint import Unreadable
from jaxrlhf.rewards.final_text import after_thinking
from jaxrlhf.rewards.judges import _score
from jaxrlhf.rewards.mathematics.stated import stated_answer
from jaxrlhf.rewards.parts import reward_function
from jaxrlhf.rewards.sandbox.programs import last_program
from jaxrlhf.rewards.worker import resolve
from jaxrlhf.trainer.evaluation import _stated_answers, majority


@pytest.mark.parametrize(
    ("response", "answer", "method", "right"),
    [
        ("So it is $1{,}234$", "234", "flexible", 0),
        ("So it is $1{,}234$", "1234", "flexible", 1),
        ("it is 1{,}000", "0", "flexible", 0),
        (r"So it is \boxed{1{,}234}", "1234", "flexible", 1),
        (r"#### 1\,234", "1234", "strict", 1),
        ("#### 1\u202f234", "1234", "strict", 1),
        ("#### 7", r"2 + 5 = 7 #### 1{,}000", "strict", 0),
        ("<think>maybe #### 7</think>The answer is 8.", "7", "strict", 0),
        ("<think>maybe #### 7</think>The answer is 8.", "8", "flexible", 1),
        ("<think>maybe #### 7", "7", "flexible", 0),
        ("<think>#### 3</think>\n#### 7", "7", "strict", 1),
        ("#### 7", "7", "strict", 1),
        ("#### **7**", "7", "strict", 1),
        ("####\n__7__", "7", "strict", 1),
        ("#### **8**", "7", "strict", 0),
        ("#### *x* 7", "7", "strict", 0),
        ("In 3 1234 steps", "1234", "flexible", 1),
    ],
)
def test_numbers_of_gsm8k(response, answer, method, right):
    assert gsm8k("", response, answer, {}, method=method) == right


@pytest.mark.parametrize(
    ("prompt", "response", "behind", "inside"),
    [
        ("", r"<think>\boxed{7} #### 7</think>\boxed{8} #### 8", 8, 8),
        ("", r"<think>\boxed{7} #### 7</think>I do not know.", None, 7),
        ("", r"<think>\boxed{8} #### 8, or \boxed{7} #### 7", None, 7),
        ("<think>\n", r"so \boxed{7} #### 7", None, 7),
        ("<think>\n", "hm", None, None),
        ("", r"\boxed{7} #### 7", 7, 7),
    ],
)
def test_answers_inside_thinking_are_read_if_the_setting_says_so(prompt, response, behind, inside):
    for setting, right in (({}, behind), ({"in_thinking": False}, behind), ({"in_thinking": True}, inside)):
        for reward in (MathReward(**setting), Gsm8kReward(**setting), ArithmeticReward(**setting)):
            part = reward_function("answer", reward, workers=1)
            function = resolve(part.reference, part.settings)
            paid = [answer for answer in ("7", "8") if function(prompt, response, answer, {}) == 1]
            assert paid == ([] if right is None else [str(right)])


def test_programs_inside_thinking_are_run_if_the_setting_says_so():
    thought, more = "<think>\n```python\nx = 1\n```\n", "</think>\n```python\nx = 2\n```\n"
    for inside in (False, True):
        part = reward_function("code", CodeReward(in_thinking=inside), workers=1)
        function = resolve(part.reference, part.settings)
        for response, right in ((thought, 1.0 * inside), (thought + more, 0.0)):
            assert function("", response, None, {"tests": ["assert x == 1"]}) == right


def test_votes_are_read_like_answers_of_the_reward():
    texts = [r"<think>\boxed{7}", r"\boxed{8}", r"so \boxed{7}", r"a</think>\boxed{8}"]
    problems = [SimpleNamespace(prompt="", source=""), SimpleNamespace(prompt="<think>\n", source="own")]
    config = SimpleNamespace(
        environment=None,
        rewards=Rewards(parts=(MathReward(),)),
        source_rewards={"own": (MathReward(in_thinking=True),)},
    )
    stated = _stated_answers(config, problems, texts)
    assert stated == [None, "8", "7", "8"]
    config.source_rewards = {}
    assert _stated_answers(config, problems, texts) == [None, "8", None, "8"]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("<think>\n```python\nprint(4)\n</think>\n```python\nprint(3)\n```\n", "print(3)"),
        ("<think>```python\nprint(4)\n```</think>\n```python\nprint(3)\n```\n", "print(3)"),
        ("<think>\n```python\nprint(4)\n```\n</think>\nNo program.", None),
        ("<think>\n```python\nprint(4)\n```\n", None),
        ("```python\nprint(3)\n```\n", "print(3)"),
    ],
)
def test_the_program_is_read_after_the_thinking(response, program):
    assert last_program(after_thinking("", response)) == program


PATTERN = JudgeReward.__dataclass_fields__["pattern"].default


@pytest.mark.parametrize(
    ("text", "highest", "score"),
    [
        ("Score: 7", 10, 7),
        ("Score: 7.5", 10, 7.5),
        ("Score: 7,5", 10, 7.5),
        ("Score: 1e-1", 1, 0.1),
        ("Score: 8/10", 10, 8),
        ("Score: 8 out of 10.", 10, 8),
        ("Score: 1/2", 1, 0.5),
        ("Score: 3 of 4", 1, 0.75),
        ("Score: 4. It is good, of course.", 5, 4),
        ("Score: 4, since 3 of 5 points are right", 5, 4),
        ("**Score:** 4", 5, 4),
        ("Score: 4 (out of 5)", 5, 4),
        ("Score: 4 - it is good", 5, 4),
        ("Score: 4 (3 of 5 points are right)", 5, 4),
    ],
)
def test_scores_of_judges(text, highest, score):
    assert _score(text, PATTERN, 0, highest) == score


@pytest.mark.parametrize(
    ("text", "highest"),
    [
        ("Score: 5e5", 10),
        ("Score: 10 out of 100", 10),
        ("Score: 1/2", 10),
        ("Score: 1,000", 10),
        ("Score: 7.5.1", 10),
        ("Score: 50%", 100),
        ("Score: 11", 10),
        ("Score: 3-4", 5),
        ("Score: 3 to 4", 5),
        ("Score: 3:5", 5),
        ("Score: 1 1/2", 5),
        ("Score: 4½", 5),
        ("Score: 4+", 5),
        ("Score: 4 (out of 10)", 5),
    ],
)
def test_scores_of_another_form_are_refused(text, highest):
    with pytest.raises(Unreadable, match="the judge's score"):
        _score(text, PATTERN, 0, highest)


@pytest.mark.parametrize(
    ("texts", "scores", "share"),
    [
        ([r"\boxed{5}"] * 2 + [r"\boxed{137}", r"\boxed{\text{137}}", r"\boxed{137.0}"], [[0, 0, 1, 1, 1]], 1.0),
        ([r"\boxed{3}"] * 2 + [r"\fbox{x+1}", r"\boxed{x+1}", r"\boxed {1+x}"], [[0, 0, 1, 1, 1]], 1.0),
        ([r"\boxed{5}"] * 2 + [r"\boxed{1{,}000}", r"\boxed{1000}", r"\boxed{1,000}"], [[0, 0, 1, 1, 1]], 1.0),
        ([r"\boxed{\frac12}", r"\boxed{0.5}", r"\boxed{2}"], [[1, 1, 0]], 1.0),
        ([r"\boxed{2}", r"\boxed{2}", r"\boxed{3}"], [[0, 0, 1]], 0.0),
        (
            ["<think>\\boxed{2}</think>\\boxed{3}", "<think>\\boxed{2}</think>\\boxed{4}", r"\boxed{3}"],
            [[1, 0, 1]],
            1.0,
        ),
        (["1", "1", "2", "2"], [[np.nan, np.nan], [1, 1]], 1.0),
        (["1", "1", "2", "2"], [[np.nan, 0], [1, 1]], 0.5),
    ],
)
def test_votes_are_grouped_by_the_rewards_comparison(texts, scores, share):
    answers = [stated_answer(after_thinking("", text)) for text in texts]
    assert majority(answers, np.array(scores, float)) == share


def test_without_scored_problems_there_is_no_majority():
    assert np.isnan(majority(["1", "2"], np.full((1, 2), np.nan)))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e10, 1e20, 1e37])
def test_advantages_do_not_depend_on_the_scale(scale):
    scores = jnp.array([0.0, scale, 1.0, 3.0, 5.0], jnp.float32)
    found = group_relative(scores, jnp.ones(5, bool), jnp.array([0, 0, 1, 1, 1]), normalize_std=True)
    np.testing.assert_allclose(found[:2], [-(0.5**0.5), 0.5**0.5], rtol=2e-3)
    np.testing.assert_allclose(found[2:], [-1.0, 0.0, 1.0], atol=1e-5)
