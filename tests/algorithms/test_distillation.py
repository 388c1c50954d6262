"""Distillation from a teacher with another tokenizer: advantages, distributions, the teacher, and what is refused."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_checkpoints
import tiny_runs
import torch
import transformers

from jaxrlhf.batch import Problem, RolloutBatch, Scores, Sequences
from jaxrlhf.config import Config, GSPOLoss, Pretrained, Rollout, Sampling, Tools, checked, load_module
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.workers.build import Builder, Phase
from tests.algorithms.test_retokenized import pairs_of_digits

by_spans, by_logits = load_module("span_distillation"), load_module("logit_distillation")


def config(**changes) -> Config:
    algorithm = by_spans.SpanDistillation(responses_per_update=16, reference_model=Pretrained("nowhere"))
    return replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None, **changes)


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
    algorithm = by_spans.SpanDistillation(responses_per_update=4, reference_model=Pretrained("nowhere"))
    settings = replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None)
    work = StepInput(settings, [], 0, algorithm.initial_state())
    scores = Scores(np.zeros(4, np.float32), np.ones(4, bool), {})
    made = by_spans.prepare(work, rollout, scores, own, (teacher, span_BT))
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


@pytest.mark.slow
def test_a_teacher_reads_responses_in_its_own_tokens(tmp_path):
    teacher = tiny_checkpoints.write(
        tmp_path, tiny_checkpoints.build("qwen2", vocab_size=448, max_position_embeddings=128)
    )
    other = pairs_of_digits(tmp_path)
    rollout = Rollout(2, 2, max_prompt_tokens=8, max_response_tokens=8)
    teacher_model = Pretrained(str(teacher))
    algorithm = by_logits.LogitDistillation(responses_per_update=4, reference_model=teacher_model, max_expansion=1.25)
    settings = replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None, rollout=rollout)
    policy, roles = embedded_tokenizer(), tuple(settings.roles)
    pool = ResourcePool("all", tuple(jax.devices()[:1]))
    builder = Builder(settings, policy, pool, roles, progress=lambda *_: None)
    worker = builder.workers(Phase(settings, roles, total_updates=1))["reference"]
    assert type(worker) is by_logits.NamingTeacher

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
    again, _, *none = worker.compute_named_spans(problems, batch, named=0)
    assert [array.shape[-1] for array in none] == [0, 0]
    np.testing.assert_allclose(again, logp_BT, atol=1e-6)
    again, _, name_BTK, named_BTK = worker.compute_named_spans(problems, batch, named=4)
    np.testing.assert_allclose(again, logp_BT, atol=1e-6)

    judge = transformers.AutoModelForCausalLM.from_pretrained(teacher).eval()
    named = 0
    for row in range(len(texts)):
        prompt = other.encode(f"<ask>{problems[row // 2].messages[0]['content']}<say>")
        said = policy.decode(token_BT[row][mask_BT[row]], skip_special_tokens=True)
        ids = other.encode(said) + [other.eos_token_id] * finished[row]
        with torch.no_grad():
            logits = judge(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        chances = torch.log_softmax(logits, -1).numpy()
        each = chances[range(len(ids)), ids]
        own = by_spans.Retokenizer(policy, other).response(token_BT[row][mask_BT[row]].tolist(), finished=finished[row])
        np.testing.assert_array_equal(span_BT[row][mask_BT[row]], own.span_S)
        for span in range(own.span_T.max() + 1):
            found = logp_BT[row][mask_BT[row]][own.span_S == span]
            np.testing.assert_allclose(found, each[own.span_T == span].sum(), atol=1e-4)
        named += _hold_names(token_BT[row], mask_BT[row], own, chances, name_BTK[row], named_BTK[row])
    assert named > 20
    assert (span_BT[~mask_BT] == -1).all() and not logp_BT[~mask_BT].any() and (name_BTK[~mask_BT] == -1).all()


def _hold_names(token_T, mask_T, own, chances, name_TK, named_TK) -> int:
    """Hold the named tokens of a row to a search through both vocabularies; their number."""
    policy, other = embedded_tokenizer(), pairs_of_digits()
    ours = {one: number for one, number in policy.get_vocab().items() if number not in policy.all_special_ids}
    pairs = {number: ours[one] for one, number in other.get_vocab().items() if one in ours}
    letters = {token for token in pairs if "\ufffd" not in other.decode([token])}  # half characters have no text
    pairs = {token: pairs[token] for token in letters} | {other.eos_token_id: policy.eos_token_id}
    for place, column in enumerate(np.flatnonzero(mask_T)):
        span, kept = own.span_S[place], name_TK[column] >= 0
        theirs = np.flatnonzero(own.span_T == span)
        if span < 0 or len(theirs) > 1 or (own.span_S == span).sum() > 1:
            assert not kept.any()
            continue
        logp_V = chances[theirs[0]]
        best = sorted(pairs, key=lambda token, x=logp_V: -x[token])[:4]
        wanted = [token for token in best if pairs[token] != token_T[column]]
        assert name_TK[column][kept].tolist() == [pairs[token] for token in wanted]
        np.testing.assert_allclose(named_TK[column][kept], logp_V[wanted], atol=1e-4)
    return int((name_TK[mask_T] >= 0).sum())


def test_the_last_token_of_a_span_has_the_distribution_and_the_others_lead_to_it():
    mask_BT = np.arange(6) < np.array([5, 6])[:, None]
    span_BT = np.array([[0, 0, 0, 1, -1, 9], [0, -1, 1, 1, 2, -1]], np.int32)
    name_BTK = np.full((2, 6, 2), -1)
    name_BTK[0, 3], name_BTK[1, 0, 1] = (7, 8), 4
    teacher_BT = np.where(span_BT >= 0, np.log(0.5), 0.0).astype(np.float32)
    named_BTK = np.full((2, 6, 2), np.log(0.125), np.float32)
    sequences = Sequences(
        np.arange(2, dtype=np.int32)[:, None].repeat(6, 1), np.full(2, 6, np.int32), mask_BT, np.arange(2)
    )
    own = np.full((2, 6), -1.0, np.float32)
    rollout = RolloutBatch(sequences, own, np.zeros(2, bool), np.zeros((2, 6), np.int32))
    algorithm = by_logits.LogitDistillation(responses_per_update=2, reference_model=Pretrained("nowhere"))
    few = replace(tiny_runs.get_config().rollout, prompts_per_step=2, responses_per_prompt=1)
    settings = replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None, rollout=few)
    work = StepInput(settings, [], 0, algorithm.initial_state())
    scores = Scores(np.zeros(2, np.float32), np.ones(2, bool), {})
    made = by_logits.prepare(work, rollout, scores, own, (teacher_BT, span_BT, name_BTK, named_BTK))
    [batch] = made.policy
    order = np.argsort(batch.sequences.token_BT[:, 0])
    fields = {name: np.asarray(array)[order] for name, array in batch.fields.items()}
    assert fields["to_last"].tolist() == [[2, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    np.testing.assert_array_equal(batch.sequences.mask_BT[order], mask_BT & (span_BT >= 0))
    np.testing.assert_array_equal(fields["named"][0, 3], (7, 8))
    assert not fields["advantage"].any()
    assert made.metrics["spans/named_probability"] == pytest.approx(np.mean([0.5, 0.75, 0.625, 0.5, 0.5]))
    assert made.metrics["spans/aligned_fraction"] == 8 / 11


def test_of_a_policy_loss_only_what_is_read_may_be_set(refused, tmp_path):
    with refused():
        checked(replace(config(), algorithm=by_logits.LogitDistillation(responses_per_update=16, policy=GSPOLoss())))
    settings = replace(config(), algorithm=by_logits.LogitDistillation(responses_per_update=16))
    with refused():
        checked(replace(settings, rollout=replace(settings.rollout, sampling=Sampling(top_k=8))))


def test_what_has_no_text_of_its_own_is_refused(refused, tmp_path):
    algorithm = by_spans.SpanDistillation(responses_per_update=16, reference_model=Pretrained(str(tmp_path)))
    settings = replace(tiny_runs.get_config(), algorithm=algorithm, cold_start=None)
    with refused():
        checked(replace(settings, environment=Tools(functions=("tools.py:calculator",))))
