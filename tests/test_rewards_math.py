"""Answers compared as mathematics."""

import subprocess
import sys
import threading

import pytest

from jaxrlhf import config
from jaxrlhf.rewards.mathematics import same_answer
from jaxrlhf.rewards.scorer import Scorer


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


def test_it_works_off_the_main_thread():
    said = []
    thread = threading.Thread(target=lambda: said.append(same_answer("", "7", "7", {})))
    thread.start()
    thread.join()
    assert said == [1.0]


@pytest.mark.slow
def test_an_endless_comparison_is_ended_by_the_pool_and_named():
    tower = r"\boxed{9^{9^{9^{9}}}}"
    with Scorer(config.Rewards(parts=(config.MathReward(),), workers=1, timeout_s=2.0)) as scorer:
        scores = scorer.score(["p"] * 3, [r"\boxed{0.5}", tower, "1"], ["1/2"] * 3, [{}] * 3)
        assert [(failure.part, failure.index, failure.cause) for failure in scorer.failures] == [("math", 1, "timeout")]
    assert scores.score_B.tolist() == [1.0, 0.0, 0.0] and scores.scorable_B.tolist() == [True, False, True]


def test_without_the_library_the_error_names_the_command():
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from jaxrlhf.rewards.worker import resolve\n"
        "resolve('jaxrlhf.rewards.mathematics:same_answer')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Refusal" in ended.stderr and "pip install 'jaxrlhf[math]'" in ended.stderr
