"""The examples of docs/rewards.md run."""

import ast
import re
import typing
from pathlib import Path

import pytest

from jaxrlhf import config
from jaxrlhf.config.rewards import RewardPart
from jaxrlhf.rewards.scorer import Scorer

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"(<!-- my_rewards.py -->\n)?```python\n(.*?)```", PAGE, re.DOTALL)
ELSEWHERE = (config.ModelReward, config.ProcessModelReward, config.JudgeReward, config.RemoteReward)


def value(block: str) -> config.Rewards:
    """Return the value of a block's last expression."""
    *before, last = ast.parse(block).body
    names = dict(vars(config))
    exec(compile(ast.Module(before, []), "docs/rewards.md", "exec"), names)
    return eval(compile(ast.Expression(last.value), "docs/rewards.md", "eval"), names)


SHOWN = [value(block) for mark, block in BLOCKS if not mark]
LOCAL = [rewards for rewards in SHOWN if not isinstance(rewards.parts[0], ELSEWHERE)]


def test_every_reward_is_shown_and_named():
    parts = {type(part) for rewards in SHOWN for part in rewards.parts}
    assert parts | {config.ArithmeticReward} == set(typing.get_args(RewardPart))
    assert "`ArithmeticReward`" in PAGE and PAGE.count("```python") == len(BLOCKS)


def a_scorer(rewards: config.Rewards) -> Scorer:
    try:
        return Scorer(rewards)
    except ValueError as error:
        if "cannot confine" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.slow
@pytest.mark.parametrize("rewards", LOCAL, ids=lambda rewards: type(rewards.parts[0]).__name__)
def test_the_shown_examples_score(rewards, monkeypatch, tmp_path):
    [own] = [block for mark, block in BLOCKS if mark]
    (tmp_path / "my_rewards.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    response = "<think>Half.</think><answer>\n```python\nprint(7)\n```\n#### 7</answer> \\boxed{7}"
    with a_scorer(rewards) as scorer:
        scores = scorer.score(["p"], [response], ["7"], [{"tests": {"inputs": ["", ""], "outputs": ["7", "8"]}}])
        assert scorer.failures == []
    firsts = {name: float(values[0]) for name, values in scores.parts.items()}
    expected = {"gsm8k": 1.0, "math": 1.0, "code": 0.5, "format": 1.0, "tags": 1.0, "repetition": 0.0, "brief": 1.0}
    assert firsts == {name: expected.get(name, pytest.approx(1.0, abs=0.01)) for name in firsts}
