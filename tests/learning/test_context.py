"""Questions about long texts are learnt from the same way however many devices split the rows."""

from dataclasses import replace

import pytest
from tiny_runs import numbers

import jaxrlhf
from jaxrlhf.config import Checkpointing, Evaluation, Layout, load

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("programs", "undrawn")]

TOKENS = 192
COMPARED = ("actor/", "supervised/", "score/", "response/", "eval/")


def run(workdir, *, context):
    """Metrics of a cold start and two steps of `grpo_haystack` on shorter texts."""
    config = load("grpo_haystack")
    cold = config.cold_start
    config = replace(
        config,
        model=replace(config.model, num_heads=4, num_kv_heads=4, head_dim=16),
        data=replace(config.data, arguments=(f"tokens={TOKENS}",), train_problems=8, eval_problems=4),
        cold_start=replace(
            cold,
            steps=8,
            data=replace(cold.data, arguments=("tokens=64", "shortest=12"), train_problems=512),
            max_prompt_tokens=96,
        ),
        algorithm=replace(config.algorithm, responses_per_update=16),
        rollout=replace(config.rollout, prompts_per_step=4, responses_per_prompt=4, max_prompt_tokens=TOKENS + 64),
        actor=replace(config.actor, layout=Layout(context=context), tokens_per_microbatch=TOKENS + 128),
        steps=2,
        evaluation=Evaluation(every_steps=2, problems=4),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        compute_dtype="float32",
        devices=context,
        workdir=str(workdir),
    )
    assert jaxrlhf.run(config).finished
    return [numbers(workdir / folder / "metrics.jsonl") for folder in ("cold_start", ".")]


def test_rows_on_four_devices_learn_what_rows_on_one_do(tmp_path):
    """Sums run in another order, and nothing else differs: neither losses nor what is sampled."""
    one, four = (run(tmp_path / str(context), context=context) for context in (1, 4))
    compared = 0
    for mine, theirs in zip(four, one, strict=True):
        for record, expected in zip(mine, theirs, strict=True):
            names = [name for name in expected if name.startswith(COMPARED)]
            assert names
            for name in names:
                assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
                compared += 1
    losses = [record["supervised/loss"] for record in one[0]]
    assert losses[-1] < 0.7 * losses[0], "it learns, so that later steps would show what differed in earlier ones"
    assert compared > 50
