"""On-policy distillation: advantages, and what is refused. `test_dataflows_learn.py` has a student learn."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_checkpoints
import tiny_runs
import torch
import transformers
from test_data_retokenized import pairs_of_digits
from tiny_runs import write_policy
from transformers import AutoTokenizer

from jaxrlhf.batch import Problem, RolloutBatch, Scores, Sequences
from jaxrlhf.config import Config, Distillation, KLInLoss, Pretrained, Rollout, SpanDistillation, Tools
from jaxrlhf.data.retokenized import Retokenizer
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.dataflows import distillation
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.trainer.run import run
from jaxrlhf.workers.build import Builder, Phase


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
    with refused():
        run(config(teacher, workdir=str(tmp_path / "run")))
    settings = config(teacher)
    with refused():
        replace(settings, algorithm=replace(settings.algorithm, kl=KLInLoss()))


# A teacher with another tokenizer.


def test_the_advantage_of_a_span_is_how_much_likelier_the_teacher_finds_its_text():
    mask_BT = np.arange(6) < np.array([5, 3, 6, 1])[:, None]
    span_BT = np.array([[0, 0, 1, 2, 2, 9], [0, 1, -1, 9, 9, 9], [0, 1, 1, 1, 2, 2], [-1, 9, 9, 9, 9, 9]], np.int32)
    rng = np.random.default_rng(0)
    own, teacher = (np.where(mask_BT, -rng.random((4, 6)), np.nan).astype(np.float32) for _ in range(2))
    teacher = np.where(span_BT >= 0, np.nan_to_num(teacher), 0).astype(np.float32)
    for row, span in np.ndindex(4, 3):  # a span has one number, at each of its tokens
        teacher[row, span_BT[row] == span] = teacher[row, span_BT[row] == span][:1].sum()
    sequences = Sequences(
        np.arange(4, dtype=np.int32)[:, None].repeat(6, 1), np.full(4, 6, np.int32), mask_BT, np.arange(4) // 2
    )
    rollout = RolloutBatch(sequences, own, np.zeros(4, bool), np.zeros((4, 6), np.int32))
    algorithm = SpanDistillation(responses_per_update=4, reference_model=Pretrained("nowhere"))
    settings = replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None)
    work = StepInput(settings, [], 0, algorithm.initial_state())
    scores = Scores(np.zeros(4, np.float32), np.ones(4, bool), {})
    made = distillation.prepare_spans(work, rollout, scores, own, (teacher, span_BT))
    [batch] = made.policy
    wanted, counts = np.zeros((4, 6)), []
    for row in range(4):
        for span in range(3):
            members = [t for t in range(6) if mask_BT[row, t] and span_BT[row, t] == span]
            counts += [len(members)] if members else []
            for t in members:
                wanted[row, t] = teacher[row, members[0]] - sum(float(own[row, t]) for t in members)
    order = np.argsort(batch.sequences.token_BT[:, 0])
    np.testing.assert_allclose(batch.fields["advantage"][order], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch.sequences.mask_BT[order], mask_BT & (span_BT >= 0))
    assert made.metrics["spans/aligned_fraction"] == 13 / 15
    assert made.metrics["spans/tokens_mean"] == pytest.approx(np.mean(counts))
    per_response = [
        -(wanted[row] / [max(np.sum(span_BT[row] == one), 1) for one in span_BT[row]]).sum() for row in range(4)
    ]
    mean = np.mean(per_response / mask_BT.sum(axis=1))
    assert made.metrics["kl/ref_sequence_mean"] == pytest.approx(mean, rel=1e-5), "a span's difference counts once"


def test_a_teacher_reads_responses_in_its_own_tokens(tmp_path):
    teacher = tiny_checkpoints.write(
        tmp_path, tiny_checkpoints.build("qwen2", vocab_size=448, max_position_embeddings=128)
    )
    other = pairs_of_digits(tmp_path)
    rollout = Rollout(2, 2, max_prompt_tokens=8, max_response_tokens=8)
    algorithm = SpanDistillation(responses_per_update=4, reference_model=Pretrained(str(teacher)), room=1.25)
    settings = replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None, rollout=rollout)
    policy, roles = embedded_tokenizer(), tuple(settings.roles)
    pool = ResourcePool("all", tuple(jax.devices()[:1]))
    builder = Builder(settings, policy, pool, roles, progress=lambda *_: None)
    worker = builder.workers(Phase(settings, roles, total_updates=1))["reference"]

    problems = [
        Problem(n, "", tuple(policy.encode(text)), messages=({"role": "user", "content": text},))
        for n, text in enumerate(("12", "3"))
    ]
    texts, finished = ("12=34", "#### 7", "1", "1234 6789"), [True, True, False, False]
    token_BT, mask_BT = np.zeros((4, 16), np.int32), np.zeros((4, 16), bool)
    for row, text in enumerate(texts):
        ids = policy.encode(text, add_special_tokens=False)[:8] + [policy.eos_token_id] * finished[row]
        start = len(problems[row // 2].prompt_tokens)
        token_BT[row, start : start + len(ids)], mask_BT[row, start : start + len(ids)] = ids, True
    sequences = Sequences(token_BT, mask_BT.argmax(1) + mask_BT.sum(1), mask_BT, np.array([0, 0, 1, 1]))
    batch = RolloutBatch(sequences, np.zeros((4, 16), np.float32), ~np.array(finished), np.zeros((4, 16), np.int32))
    logp_BT, span_BT = worker.compute_spans(problems, batch)

    judge = transformers.AutoModelForCausalLM.from_pretrained(teacher).eval()
    for row in range(len(texts)):
        prompt = other.encode(f"<ask>{problems[row // 2].messages[0]['content']}<say>")
        said = policy.decode(token_BT[row][mask_BT[row]], skip_special_tokens=True)
        ids = other.encode(said) + [other.eos_token_id] * finished[row]
        with torch.no_grad():
            logits = judge(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        each = torch.log_softmax(logits, -1)[range(len(ids)), ids].numpy()
        own = Retokenizer(policy, other).response(token_BT[row][mask_BT[row]].tolist(), finished=finished[row])
        np.testing.assert_array_equal(span_BT[row][mask_BT[row]], own.span_S)
        for span in range(own.span_T.max() + 1):
            found = logp_BT[row][mask_BT[row]][own.span_S == span]
            np.testing.assert_allclose(found, each[own.span_T == span].sum(), atol=1e-4)
    assert (span_BT[~mask_BT] == -1).all() and not logp_BT[~mask_BT].any()


def test_what_has_no_text_of_its_own_is_refused(refused, tmp_path):
    algorithm = SpanDistillation(responses_per_update=16, reference_model=Pretrained(str(tmp_path)))
    settings = replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None)
    with refused():
        replace(settings, environment=Tools(functions=("tools.py:calculator",)))
