"""Process reward models: how labelled steps are read, their loss, what is refused. A slow test has one learn."""

import json

import jax
import numpy as np
import pytest
import torch

from jaxrlhf.algos import solution_score
from jaxrlhf.config import (
    Arithmetic,
    Config,
    FormatReward,
    ModelReward,
    ProcessModelReward,
    Rewards,
    Rollout,
    StepFile,
    Training,
    checked,
    load_module,
)
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from scripts.learning.task import TINY, training

process_reward = load_module("process_reward_model")
ProcessRewardModel, step_objective = process_reward.ProcessRewardModel, process_reward.step_objective


def write(path, lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def config(file: str, **changes) -> Config:
    settings = {
        "data": StepFile(file),
        "algorithm": ProcessRewardModel(solutions_per_update=2, critic=training(5e-3)),
        "rewards": Rewards(),
        "rollout": Rollout(max_prompt_tokens=12, max_response_tokens=12),
        **changes,
    }
    return checked(Config(name="steps", model=TINY, steps=1, **settings))


def test_steps_are_read_with_their_separators_and_judged_after_them(tmp_path):
    lines = [
        {"prompt": "12", "completions": ["1", "23"], "labels": [True, False]},
        {"prompt": [{"role": "user", "content": "3"}], "completions": ["7"], "labels": [True]},
        {"prompt": "4", "completions": ["1234", "123456"], "labels": [True, True]},  # of one token too many
    ]
    tokenizer = embedded_tokenizer()
    settings = config(write(tmp_path / "steps.jsonl", lines))
    loaded = load_problems(settings.data, tokenizer, split="train", max_prompt_tokens=12, max_solution_tokens=11)
    assert (loaded.total, loaded.dropped_too_long) == (3, 1)
    first, second = loaded.problems[:2]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    encoded = [tokenizer.encode(text, add_special_tokens=False) + newline for text in ("1", "23", "7")]
    assert first.solution_tokens == (*encoded[0], *encoded[1]) and second.solution_tokens == (*encoded[2],)
    assert (first.step_ends, first.step_labels) == ((len(encoded[0]), len(encoded[0]) + len(encoded[1])), (True, False))
    others = write(tmp_path / "others.jsonl", [{**lines[0], "labels": [True, True]}, *lines[1:]])
    again = load_problems(StepFile(others), tokenizer, split="train", max_prompt_tokens=12, max_solution_tokens=11)
    assert again.problems.fingerprint != loaded.problems.fingerprint

    batch = process_reward.step_experience([first, second], settings)
    for row, problem in enumerate((first, second)):
        start = len(problem.prompt_tokens)
        places = np.flatnonzero(batch.sequences.mask_BT[row])
        np.testing.assert_array_equal(places, [start + end for end in problem.step_ends])
        assert batch.fields["label"][row, places].tolist() == [*map(float, problem.step_labels)]
        assert batch.sequences.length_B[row] == places[-1] + 1
        assert batch.sequences.token_BT[row, places - 1].tolist() == newline * len(places)
    np.testing.assert_allclose(batch.weight_BT, batch.sequences.mask_BT / 3, rtol=1e-6)


def test_the_loss_is_the_cross_entropy_of_labels_at_the_ends_of_steps():
    rng = np.random.default_rng(0)
    mask, label = rng.random((3, 9)) < 0.4, (rng.random((3, 9)) < 0.5).astype(np.float32)
    logit = np.where(mask, rng.normal(scale=3, size=mask.shape), np.nan).astype(np.float32)
    weight = (mask / mask.sum()).astype(np.float32)

    def loss(logit):
        terms = step_objective(logit, mask, weight, {"label": label}, None)
        return terms.loss.sum(), terms.metrics

    (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(logit)
    theirs = torch.tensor(logit[mask], requires_grad=True)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(theirs, torch.tensor(label[mask]))
    wanted.backward()
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-6)
    np.testing.assert_allclose(slope[mask], theirs.grad, rtol=1e-5, atol=1e-7)
    assert not slope[~mask].any()
    right = np.mean((logit[mask] > 0) == (label[mask] == 1))
    assert metrics["steps/accuracy"].sum() / mask.sum() == pytest.approx(right)


def test_a_solution_is_scored_by_the_chances_of_its_steps():
    logit = np.log([0.9 / 0.1, 0.2 / 0.8, 0.5 / 0.5])
    wanted = {"min": 0.2, "last": 0.5, "mean": 1.6 / 3, "product": 0.09}
    assert {how: solution_score(logit, how) for how in wanted} == pytest.approx(wanted)
    assert solution_score(np.array([-800.0, 800.0]), "mean") == 0.5


def test_what_has_no_labelled_steps_is_refused(refused, tmp_path):
    good = {"prompt": "1", "completions": ["1"], "labels": [True]}
    for number, change in enumerate(
        [{"completions": "1"}, {"labels": [1]}, {"labels": [True, False]}, {"completions": []}]
    ):
        file = write(tmp_path / f"{number}.jsonl", [good, {**good, **change}])
        with refused():
            load_problems(StepFile(file), embedded_tokenizer(), split="train", max_prompt_tokens=12)
    for changes in [
        {"data": Arithmetic()},
        {"rewards": Rewards(parts=(FormatReward(),))},
        {"actor": Training(tokens_per_microbatch=4096)},
    ]:
        with refused():
            checked(config("steps.jsonl", **changes))
    for build in (lambda: StepFile("steps.jsonl", separator=""), lambda: ProcessModelReward("judge", separator="")):
        with refused():
            build()


def test_parts_that_score_otherwise_by_one_model_are_told_apart():
    parts = [ModelReward("judge"), ProcessModelReward("judge"), ProcessModelReward("judge", steps="last")]
    assert len({part.key for part in parts}) == 3
