"""Answers compared as mathematics."""

import json
import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from math_answers import KINDS, cases, stated
from math_references import TYPICAL

from jaxrlhf.rewards.mathematics import same_answer
from jaxrlhf.rewards.mathematics.stated import read_as_text


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("7", "so it is $7$", 1),
        ("7", "so it is 7.", 1),
        ("7", r"\boxed{8} was wrong: \boxed{7}", 1),  # the last box counts
        ("7", r"\boxed{7} was wrong: \boxed{8}", 0),
        ("7", "7 is wrong, 8 is right", 0),
        ("7", "", 0),
        ("1/2", r"The answer is $\frac{2}{4}$", 1),
        (r"\frac{1}{2}", "#### 0.5", 1),
        (r"$\frac{1}{2}$", r"\boxed{\dfrac{1}{2}}", 1),
        (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}", 0),
        ("1,234", r"\boxed{1234}", 1),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        ("x^2+2x+1", r"\boxed{(x-1)^2}", 0),
        (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", 1),
        (r"2\pi", r"\boxed{\pi+\pi}", 1),
        ("(1,2]", r"\boxed{(1,2]}", 1),
        ("(1,2]", r"\boxed{(1,2)}", 0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        ("$18", "$18 in all", 1),
        (r"\$18{,}000", r"\boxed{\$18,000}", 1),
        (r"\$18", r"\boxed{19}", 0),
        ("7", r"\boxed{x=7}", 1),
        ("7", r"\boxed{7.}", 1),
        (r"\frac12", r"\boxed{\frac{1}{2} .}", 1),
        ("B", r"\boxed{\text{B.}}", 1),
        ("7", r"\boxed {7}", 1),
        ("7", r"\boxed 7", 1),
        ("7", r"\fbox{8}, no: \fbox{7}", 1),
        ("7", r"\boxed{7} is what \boxed shows", 1),
        ("1000", r"\boxed{1\,000}", 1),
        ("1000000", r"\boxed{1 000 000}", 1),
        ("0", r"\boxed{1\,000}", 0),
        (r"10\,000", "10000", 1),
        (r"10\,000", r"\boxed{0}", 0),
        ("3", r"\boxed{x = 2020\,100}", 0),  # not a gap between thousands
        (
            r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.",
            r"\boxed{\left\{\begin{array}{l}x=1\\y=2\end{array}\right.}",
            1,
        ),
    ],
)
def test_equal_as_mathematics(answer, response, right):
    assert same_answer("", response, answer, {}) == right


@pytest.mark.parametrize("answer", [None, "", "$$"])
def test_a_reference_that_cannot_be_read_is_an_error_and_not_a_wrong_answer(answer):
    with pytest.raises(ValueError, match="reference answer"):
        same_answer("", "7", answer, {})


def test_comparison_works_in_other_threads():
    said = []
    thread = threading.Thread(target=lambda: said.append(same_answer("", "7", "7", {})))
    thread.start()
    thread.join()
    assert said == [1.0]


FIELD = [
    json.loads(line) for line in (Path(__file__).parents[1] / "golden" / "field_answers.jsonl").read_text().splitlines()
]
"""Answers that users of math rewards reported, with their correct values."""


@pytest.mark.parametrize("case", FIELD, ids=lambda case: f"{case['kind']}: {case['response'][:40]}")
def test_answers_in_common_forms(case):
    assert same_answer("", case["response"], case["answer"], {}) == case["right"]


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        # A text that cannot be read as a whole is compared as text; no number inside counts.
        (r"\int_0^1 x\,dx = 7", r"\boxed{7}", 0),
        (r"\int_0^1 x\,dx", r"\boxed{\int_0^1 x \, dx}", 1),
        (r"\begin{cases}x=1\\y=2\end{cases}", r"\boxed{y=2, x=1}", 1),
        (r"\begin{cases}x=1\\y=2\end{cases}", r"\boxed{x=2, y=1}", 0),
        (r"\mathbb{R}", r"\boxed{(-\infty, \infty)}", 1),
        (r"\mathbb{R}\setminus\{2\}", r"\boxed{(-\infty,2)\cup(2,\infty)}", 1),
        (r"\mathbb{R}\setminus\{2\}", r"\boxed{\mathbb{R}}", 0),
        (r"\emptyset", r"\boxed{\text{no solution}}", 1),
        (r"\{x \mid x > 3\}", r"\boxed{(3,\infty)}", 1),
        ("[1,2]\\cup[2,3]", r"\boxed{[1,3]}", 1),
        ("[1,2)\\cup(2,3]", r"\boxed{[1,3]}", 0),
        # Units: missing on one side, different, or of another kind.
        (r"5\text{ km}", r"\boxed{5000\text{ m}}", 1),
        (r"5\text{ km}", r"\boxed{5}", 1),
        (r"5\text{ km}", r"\boxed{5\text{ m}}", 0),
        (r"12\text{ cm}^2", r"\boxed{12\text{ square centimeters}}", 1),
        (r"12\text{ cm}^2", r"\boxed{12\text{ cm}^3}", 0),
        ("2 dollars and 50 cents", r"\boxed{250\text{ cents}}", 1),
        (r"5\text{ feet }4\text{ inches}", r"\boxed{64\text{ inches}}", 1),
        # Order: of points and vectors, not of lists and sets.
        ("(1,2)", r"\boxed{(2,1)}", 0),
        ("1,2", r"\boxed{2,1}", 1),
        (r"\{1,2\}", r"\boxed{1,2}", 1),
        ("(1,2)", r"\boxed{1,2}", 0),
        (r"\begin{pmatrix}1\\2\\3\end{pmatrix}", r"\boxed{(1,2,3)}", 1),
        # Case: ignored for options and words, not for variables.
        ("B", r"\boxed{b}", 1),
        ("Paris", r"\boxed{\text{paris}}", 1),
        ("x+1", r"\boxed{X+1}", 0),
        ("east", r"\boxed{seat}", 0),
        ("xy", r"\boxed{yx}", 1),
        # Percent: the number, or its hundredth.
        (r"1\%", r"\boxed{0.01}", 1),
        (r"1\%", r"\boxed{1}", 1),
        (r"1\%", r"\boxed{0.01\%}", 0),
        # Decimals are exact.
        (r"\frac13", r"\boxed{0.333333}", 0),
        (r"\frac13", r"\boxed{0.\overline{3}}", 1),
        (r"\pi", r"\boxed{3.14159265358979}", 0),
        ("0", r"\boxed{10^{-30}}", 0),
        # Equations and inequalities.
        ("y=2x+1", r"\boxed{2x-y+1=0}", 1),
        ("y=2x+1", r"\boxed{y=2x-1}", 0),
        ("2x+1>0", r"\boxed{-2x-1<0}", 1),
        ("2x+1>0", r"\boxed{2x+1<0}", 0),
        ("(x-1)^2+y^2=4", r"\boxed{x^2-2x+1+y^2=4}", 1),
        (r"f(x)=x^2", r"\boxed{x^2}", 1),
        (r"AB = 5", r"\boxed{5}", 1),
        ("x+y=7", r"\boxed{7}", 0),
        # Forms of numbers.
        ("-8", r"\boxed{(-2)^3}", 1),
        ("-2", r"\boxed{\sqrt[3]{-8}}", 1),
        (r"\sqrt{x^2}", r"\boxed{|x|}", 1),
        (r"\sqrt{x^2}", r"\boxed{x}", 0),
        (r"\sin 30^\circ", r"\boxed{\frac12}", 1),
        (r"\binom{5}{2}", r"\boxed{10}", 1),
        ("5!", r"\boxed{120}", 1),
        (r"\log_2 8", r"\boxed{3}", 1),
        (r"e^{i\pi}", r"\boxed{-1}", 1),
        (r"2^{1/2}", r"\boxed{\sqrt2}", 1),
        (r"a^2-b^2", r"\boxed{(a-b)(a+b)}", 1),
        (r"\frac{x+1}{x-1}", r"\boxed{1+\frac{2}{x-1}}", 1),
        (r"\frac{x+1}{x-1}", r"\boxed{1+\frac{2}{x+1}}", 0),
        (r"\lfloor 3.7 \rfloor", r"\boxed{3}", 1),
        (r"1+2+\ldots+n", r"\boxed{n}", 0),
        # Places of the final answer.
        ("12", "There are 3 boxes of 4, so the answer is 12 because 3*4 = 12.", 1),
        ("4", "There are 3 boxes of 4, so the answer is 12 because 3*4 = 12.", 0),
        ("18", "She makes 9 * 2 = $18 every day.", 1),
        ("7", "It costs $5 and $7.", 0),
        ("3.50", "The answer is $3.50.", 1),
        ("9", "Step 1: 3. Step 2: 9", 1),
        ("72", "Answer: **72**\n\nI hope this helps!", 1),
        ("7", r"\boxed{7", 0),
        (r"\frac{1}{2}", "So the result is 1/2, as wanted.", 1),
    ],
)
def test_the_rules_of_the_documentation(answer, response, right):
    assert same_answer("", response, answer, {}) == right


@pytest.mark.parametrize(
    ("prompt", "response", "right"),
    [
        ("", r"<think>\boxed{8}</think>\boxed{7}", 1),
        ("", r"<think>\boxed{7}</think>\boxed{8}", 0),
        ("", r"<think>\boxed{7}", 0),
        ("<think>\n", r"so \boxed{7} it seems", 0),
        ("<think>\n", r"so \boxed{8}</think> It is \boxed{7}", 1),
        ("", r"<think>a</think>b<think>c</think>\boxed{7}", 1),
        ("", r"\boxed{7}<think>but then", 1),
    ],
)
def test_the_answer_is_read_after_the_thinking(prompt, response, right):
    assert same_answer(prompt, response, "7", {}) == right


def rates(count: int) -> tuple[float, float]:
    """Return the share of right spellings, and of wrong answers, that score 1."""
    dice = random.Random(1)
    paid: dict[str, list[float]] = {"right": [], "wrong": []}
    for case in cases(0, count):
        for name, answers in (("right", case.right), ("wrong", case.wrong)):
            paid[name] += [same_answer("", stated(answer, dice), case.reference, {}) for answer in answers]
    return mean(paid["right"]), mean(paid["wrong"])


def test_wrong_answers_that_look_right_score_zero():
    right, wrong = rates(2 * len(KINDS))
    assert right >= 0.98 and wrong == 0


@pytest.mark.slow
def test_wrong_answers_that_look_right_score_zero_at_length():
    right, wrong = rates(60 * len(KINDS))
    assert right >= 0.98 and wrong <= 1e-3


@pytest.mark.parametrize(
    "answer", [r"9^{9^{9^{9}}}", r"(10^{10})!", "2^{2^{2^{2^{2^{2}}}}}", "9" * 3000, "(" * 500 + "7" + ")" * 500]
)
def test_comparisons_end(answer):
    start = time.monotonic()
    assert same_answer("", rf"\boxed{{{answer}}}", "7", {}) == 0
    assert same_answer("", rf"\boxed{{{answer}}}", answer, {}) == 1
    assert time.monotonic() - start < 5


def test_references_that_can_only_be_compared_as_text_are_listed():
    read = ["7", r"\frac12", "Paris", r"\text{no solution}", "x=3, y=4", r"[1,\infty)", "B"]
    texts = [r"\int_0^1 x\,dx", "3 apples because 4", r"\sum_{k=1}^n k"]
    assert read_as_text([*read, *texts]) == texts


def test_typical_references_are_parsed_and_equal_only_themselves():
    assert read_as_text(TYPICAL) == []
    assert [text for text in TYPICAL if not same_answer("", rf"\boxed{{{text}}}", text, {})] == []
    neighbours = list(pairwise(TYPICAL))
    equal = [pair for pair in neighbours if same_answer("", rf"\boxed{{{pair[0]}}}", pair[1], {})]
    assert equal == []
