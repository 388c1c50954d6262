"""On-policy distillation: advantages, and what is refused. `dataflows/test_learn.py` has a student learn."""

from dataclasses import replace

import numpy as np
import tiny_runs
from tiny_runs import write_policy
from transformers import AutoTokenizer

from jaxrlhf.batch import RolloutBatch, Scores, Sequences
from jaxrlhf.config import (
    Config,
    Distillation,
    KLInLoss,
    Pretrained,
)
from jaxrlhf.dataflows import distillation
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.trainer.run import run


def config(teacher, **changes) -> Config:
    algorithm = Distillation(responses_per_update=16, reference_model=Pretrained(str(teacher)))
    return replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None, **changes)


def test_the_advantage_is_how_much_likelier_the_teacher_finds_each_token_scored_or_not(tmp_path):
    rng = np.random.default_rng(0)
    mask_BT = rng.random((16, 80)) < 0.3
    student, teacher = (np.where(mask_BT, -rng.random((16, 80)), np.nan).astype(np.float32) for _ in range(2))
    sequences = Sequences(np.zeros((16, 80), np.int32), np.full(16, 80, np.int32), mask_BT, np.arange(16) // 2)
    rollout = RolloutBatch(sequences, student, np.zeros(16, bool), np.zeros((16, 80), np.int32))
    scores = Scores(np.zeros(16, np.float32), np.arange(16) > 3, {})
    settings = config(tmp_path)
    work = StepInput(settings, [], 0, settings.algorithm.initial_state(), lambda: [])
    [batch] = distillation.prepare(work, rollout, scores, student, teacher).policy
    wanted_BT = np.where(mask_BT, teacher - student, 0.0)
    np.testing.assert_allclose(np.sort(batch.fields["advantage"].ravel()), np.sort(wanted_BT.ravel()), rtol=1e-6)
    assert batch.sequences.mask_BT.sum() == mask_BT.sum()


def test_a_teacher_with_other_tokens_and_a_second_kl_are_refused(refused, tmp_path):
    teacher = write_policy(tmp_path / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(teacher)
    with refused():  # and not after the cold start
        run(replace(config(teacher, workdir=str(tmp_path / "run")), cold_start=tiny_runs.get_config().cold_start))
    assert not list((tmp_path / "run").glob("cold_start/checkpoints/*"))
    settings = config(teacher)
    with refused():
        replace(settings, algorithm=replace(settings.algorithm, kl=KLInLoss()))
