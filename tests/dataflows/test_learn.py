"""Algorithms learn the smallest task there is, from each of three seeds, docs/algorithms.md's own as well; further ones
from one seed. The slow tier has the first seed of the algorithms that learn from different signals."""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from learning_run import SEEDS
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import (
    GRPO,
    Config,
    Distillation,
    Layout,
    PolicyGradient,
    Preference,
    Pretrained,
    ProcessModelReward,
    RewardModel,
    Rollout,
    StepFile,
    load_module,
)
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.trainer.policy import evaluate_policy, export_policy
from jaxrlhf.workers.score_model import ScoreModel
from scripts.learning import task
from scripts.learning.task import exported, from_pairs, further, generating, supervised, write_records
from tests.algorithms.test_retokenized import pairs_of_digits
from tests.extending.test_extending import shown_algorithm

SHOWN = "the file that docs/algorithms.md shows"
SLOW = ("PPO", "GRPO", SHOWN, "DPO", "RewardModel")
"""Learnt by in the slow tier: with a critic and without, by a user's own, from pairs by a policy and by a judge. Others
share their way and differ by a formula, which the fast tests compare with naive ones."""

EVERY_SEED = pytest.mark.parametrize("seed", SEEDS)


def every_seed_of(names):
    """Three seeds of each algorithm; the slow tier has the first seed of those in `SLOW`, the `seeds` tier the rest."""
    cases = [
        pytest.param(name, seed.values[0], marks=seed.marks if name in SLOW else pytest.mark.seeds)
        for name in names
        for seed in SEEDS
    ]
    return pytest.mark.parametrize(("name", "seed"), cases)


pytestmark = pytest.mark.usefixtures("programs", "undrawn")


@pytest.fixture(scope="module")
def folder(programs, tmp_path_factory) -> Path:
    """The problems."""
    return write_records(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def guessing(folder) -> Callable[[int], Pretrained]:
    """The policy of a seed, from which all start but supervised training."""
    return cache(lambda seed: exported(folder, "guess", seed=seed))


def run(config: Config, workdir: Path) -> list[dict]:
    """The metrics of a run; no step compiles after the first that trains the policy."""
    assert jaxrlhf.run(replace(config, workdir=str(workdir))).finished
    logged = records(workdir / "metrics.jsonl")
    resting = getattr(config.algorithm, "critic_warmup_steps", 0)
    assert len({record["compile/count"] for record in logged[resting:]}) == 1
    return logged


@every_seed_of([*generating(), SHOWN])
def test_it_learns_from_scores(name, seed, folder, guessing, tmp_path):
    algorithm: PolicyGradient = (
        replace(jaxrlhf.load(shown_algorithm(tmp_path)).algorithm, responses_per_update=64)
        if name == SHOWN
        else generating()[name]
    )
    first, *_, last = logged = run(task.task(folder, algorithm, guessing(seed), seed=seed), tmp_path / "run")
    assert first["eval/accuracy_at_start"] <= 0.5
    assert first["score/mean"] <= 0.5
    assert last["eval/accuracy"] >= 0.9
    # DAPO's are of problems on which answers still differ.
    assert logged[-1]["score/mean"] >= 0.9 or name == "DAPO"
    if name == "DAPO":
        assert_every_update_is_of_groups_that_differ(logged, records(tmp_path / "run/samples.jsonl"))


def assert_every_update_is_of_groups_that_differ(logged: list[dict], samples: list[dict]) -> None:
    scores = defaultdict(lambda: defaultdict(set))
    for sample in samples:
        right, _overlong = sample["parts"].values()
        scores[sample["step"]][sample["prompt"]].add(right)
    for record in logged:
        different = sum(len(group) > 1 for group in scores[record["step"]].values())
        assert record["group/kept"] == different > 0
    assert all(record["group/kept"] == 8 for record in logged[:5])
    assert max(record["group/generated"] for record in logged) > 8


@every_seed_of(from_pairs())
def test_it_learns_from_pairs(name, seed, folder, guessing, tmp_path):
    algorithm = from_pairs()[name]
    first, *_, last = run(task.task(folder, algorithm, guessing(seed), seed=seed), tmp_path / "run")
    assert first["eval/accuracy_at_start"] == 0.5  # policy and reference are the same, or all scores are
    assert last["eval/accuracy"] >= 0.95
    assert "throughput/generated_tokens_per_s" not in last
    if name == "DPO":
        assert first["preference/loss"] == pytest.approx(np.log(2), abs=1e-5)
        assert first["preference/margin"] == pytest.approx(0, abs=1e-4)
    if not isinstance(algorithm, RewardModel):
        export_policy(tmp_path / "run", tmp_path / "policy")
        assert "Qwen2ForCausalLM" in (tmp_path / "policy" / "config.json").read_text()
        answering, policy = task.task(folder, GRPO(), guessing(seed)), str(tmp_path / "policy")
        assert evaluate_policy(answering, policy=policy, samples=1, show=0)["eval/accuracy"] >= 0.9


@pytest.mark.seeds
@pytest.mark.parametrize("name", further())
def test_further_ones_learn_from_one_seed(name, folder, guessing, tmp_path):
    algorithm = further()[name]
    first, *_, last = run(task.task(folder, algorithm, guessing(0)), tmp_path)
    if isinstance(algorithm, Preference):
        assert last["eval/accuracy"] >= 0.95
        last = evaluate_policy(task.task(folder, GRPO(), guessing(0)), policy=str(tmp_path), samples=1, show=0)
    else:
        assert first["eval/accuracy_at_start"] <= 0.5
    assert last["eval/accuracy"] >= 0.9


@pytest.mark.seeds
def test_it_learns_from_labelled_steps_and_scores_responses(folder, tmp_path):
    """A step is a digit, and right if that is even."""
    rng = random.Random(0)

    def labelled() -> dict:
        steps = rng.choices("0123456789", k=2)
        return {"prompt": "385", "completions": steps, "labels": [int(step) % 2 == 0 for step in steps]}

    for name, count in (("train", 400), ("evaluation", task.HELD_OUT)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(labelled()) + "\n" for _ in range(count)))
    process_reward = load_module("process_reward_model")
    algorithm = process_reward.ProcessRewardModel(solutions_per_update=64, critic=task.training(5e-3))
    data = StepFile(*(str(tmp_path / f"{name}.jsonl") for name in ("train", "evaluation")))
    changes = {"data": data, "rollout": Rollout(max_prompt_tokens=8, max_response_tokens=5), "steps": 60}
    first, *_, last = run(task.task(folder, algorithm, task.TINY, **changes), tmp_path / "run")
    assert first["steps/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert last["eval/accuracy"] == 1

    export_policy(tmp_path / "run", tmp_path / "judge")
    mesh = factored_mesh(Layout(), jax.devices()[:1])
    judge = ScoreModel(str(tmp_path / "judge"), mesh=mesh, dtype=np.dtype("float32"))
    shown = load_problems(data, embedded_tokenizer(), split="evaluation", max_prompt_tokens=8).problems
    texts = [(problem.prompt, "\n".join(problem.record["completions"]), True) for problem in shown]
    score_P = judge.reading(ProcessModelReward("judge"))(texts)
    right_P = np.array([all(problem.step_labels) for problem in shown])
    assert 0 < right_P.sum() < len(right_P)
    np.testing.assert_array_equal(score_P > 0.5, right_P)


@pytest.mark.seeds  # the teacher below has learnt from some
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_from_demonstrations(seed, folder, tmp_path):
    first, *_, last = run(supervised(folder, "answer", seed=seed), tmp_path)
    assert first["eval/accuracy_at_start"] <= 0.05
    assert last["eval/accuracy"] >= 0.95


@pytest.fixture(scope="module")
def teacher(folder) -> Pretrained:
    """A policy of another shape."""
    return exported(folder, "answer", seed=3, model=replace(task.TINY, hidden_size=48, num_layers=2))


@EVERY_SEED
def test_it_learns_from_a_teacher(seed, folder, guessing, teacher, tmp_path):
    algorithm = Distillation(reference_model=teacher)
    first, *_, last = run(task.task(folder, algorithm, guessing(seed), seed=seed), tmp_path)
    assert first["eval/accuracy_at_start"] <= 0.5
    assert last["eval/accuracy"] >= 0.9
    assert last["kl/ref_sequence_mean"] <= 0.2 * first["kl/ref_sequence_mean"]


@pytest.mark.seeds
@pytest.mark.parametrize(
    "distillation",
    [load_module("span_distillation").SpanDistillation, load_module("logit_distillation").LogitDistillation],
)
def test_it_learns_from_a_teacher_with_another_tokenizer(distillation, folder, guessing, tmp_path):
    pairs_of_digits(tmp_path / "tokenizer")
    judge = exported(write_records(tmp_path), "answer", seed=3, tokenizer=str(tmp_path / "tokenizer"))
    algorithm = distillation(reference_model=judge)
    first, *_, last = run(task.task(folder, algorithm, guessing(0)), tmp_path / "run")
    assert first["eval/accuracy_at_start"] <= 0.5
    assert last["eval/accuracy"] >= 0.9
    assert last["spans/aligned_fraction"] == 1 and last["spans/tokens_mean"] == 1  # of a digit, or of EOS
    assert last["kl/ref_sequence_mean"] <= 0.2 * first["kl/ref_sequence_mean"]
