"""A whole run on a mixture with rewards and system prompts by source, further evaluation sets, and an online band."""

import json
from dataclasses import replace

import pytest
from placed_runs import assert_resumed, cut_after
from tiny_runs import get_config, records

import jaxrlhf
from jaxrlhf.config import (
    GRPO,
    ArithmeticReward,
    Checkpointing,
    Evaluation,
    EvaluationSet,
    FormatReward,
    Mixture,
    PromptFile,
    Rewards,
    Rollout,
    Sampling,
    Selection,
    Source,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs", "undrawn")]


def write(path, count, **fields):
    rows = [{"prompt": f"{n}+1?", "answer": n + 1, **fields} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("mixture")
    sums, odd = write(tmp_path / "sums.jsonl", 8), write(tmp_path / "odd.jsonl", 6, odd=True)
    sources = (
        Source(name="sums", data=PromptFile(sums, evaluation=sums), weight=3),
        Source(
            name="odd",
            data=PromptFile(odd, evaluation=odd),
            rewards=(FormatReward(r"(?s).*", weight=1.0),),
            system_prompt="Be brief.",
        ),
    )
    several = EvaluationSet(name="several", data=PromptFile(sums, evaluation=odd), samples=2, problems=3)
    tiny = get_config()
    return replace(
        tiny,
        steps=4,
        cold_start=None,
        algorithm=GRPO(responses_per_update=8),
        data=Mixture(sources),
        selection=Selection(online=True, band=(0.0, 0.9)),
        rewards=Rewards((ArithmeticReward(),)),
        rollout=Rollout(4, 2, max_prompt_tokens=32, max_response_tokens=8, sampling=Sampling()),
        evaluation=Evaluation(every_steps=2, problems=4, sets=(several,)),
        checkpoint=Checkpointing(every_steps=2, keep_best=0),
        workdir=str(tmp_path / "run"),
    )


@pytest.fixture(scope="module")
def whole(config, programs, undrawn):
    result = jaxrlhf.run(config)
    assert result.finished
    return result


def test_each_source_is_sampled_scored_and_evaluated_by_itself(whole):
    steps = records(whole.workdir / "metrics.jsonl")
    assert [step["source/sums/prompts"] for step in steps] == [3.0] * 4
    assert all(step["source/odd/score"] == 1.0 and "score/odd/format" in step for step in steps)
    last = steps[-1]
    assert whole.metrics["eval/accuracy"] == whole.accuracy == last["eval/accuracy"]
    assert last["eval/odd/accuracy"] == 1.0 and last["eval/problems"] == 8.0
    for name in ("accuracy", "pass@1", "pass@2", "maj@2", "avg@2", "length_mean"):
        assert f"eval/several/{name}" in last
    assert last["eval/several/problems"] == 3.0
    prompts = {row["prompt"] for row in records(whole.workdir / "samples.jsonl")}
    assert any("Be brief." in prompt for prompt in prompts) and any("Be brief." not in prompt for prompt in prompts)
    json.loads((whole.workdir / "timeline.json").read_text())


def test_a_mixture_resumes_with_the_same_numbers(config, whole, tmp_path):
    workdir = cut_after(2, whole.workdir, tmp_path / "resumed")
    assert jaxrlhf.run(replace(config, workdir=str(workdir))).finished
    assert_resumed(workdir, whole.workdir, after=2)
    rows = [
        [(row["step"], row["prompt"], row["response"]) for row in records(folder / "samples.jsonl")]
        for folder in (whole.workdir, workdir)
    ]
    assert rows[0] == rows[1]
