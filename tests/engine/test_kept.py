"""Tokens that a draw was among: recorded while sampling, and what the trainer's log-probabilities are over."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_arrays import PackedArrays
from tiny_models import sharp
from tiny_runs import get_config, records, training

from jaxrlhf import models
from jaxrlhf.batch import Problem, Sequences
from jaxrlhf.config import (
    GRPO,
    PRIME,
    Checkpointing,
    Evaluation,
    RolloutServer,
    Sampling,
    Tools,
    TruncatedImportance,
    checked,
)
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.sampling import sample, settings_of, uniforms
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.mesh import mesh_of
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.trainer.run import run
from jaxrlhf.workers.build import Builder, Phase
from jaxrlhf.workers.generation.rollouts import to_rollout
from tests.engine.test_sampling import chi_square, nucleus, softmax

MODEL = ModelConfig(
    family="qwen2",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
WIDTH, STOP = 20, 3
SAMPLING = Sampling(temperature=0.8, top_k=8, top_p=0.8, min_p=0.05, min_tokens=3)
SAMPLE = jax.jit(functools.partial(sample, most_kept=8))


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, sharp(MODEL, deviation=0.4))


@pytest.fixture(scope="module")
def rollout(params):
    """Twelve responses in five slots to four prompts, three to each."""
    engine = Engine(
        MODEL,
        mesh_of({}, jax.devices()[:1]),
        slots=5,
        max_prompt_tokens=10,
        max_response_tokens=10,
        stop_tokens=(STOP,),
        decode_tokens_per_dispatch=3,
        most_kept=8,
    )
    engine.load(params, version=0)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 40, length).tolist()) for length in (6, 7, 8, 10)]
    problems = [Problem(index // 3, "", prompts[index // 3]) for index in range(12)]
    requests = [Request(index, problem.prompt_tokens) for index, problem in enumerate(problems)]
    return to_rollout(problems, engine.generate(requests, SAMPLING, seed=1), width=WIDTH)


def draws(each, *, count: int, logits: np.ndarray, position: int = 0, stop: int = -1):
    """`count` draws with each sampling, side by side."""
    settings = settings_of([sampling for sampling in each for _ in range(count)])
    total = count * len(each)
    position_B = jnp.full(total, position, jnp.int32)
    uniform_B2 = uniforms(jnp.zeros(total, jnp.uint32), jnp.arange(total, dtype=jnp.uint32), position_B)
    logits_BV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (total, len(logits)))
    sampled = SAMPLE(logits_BV, uniform_B2, position_B, settings, stop_BE=jnp.full((total, 1), stop, jnp.int32))
    return [np.asarray(array).reshape(len(each), count, *array.shape[1:]) for array in sampled]


@pytest.mark.parametrize("vocab", [5, 24])  # fewer tokens than are recorded, and more
def test_slots_record_what_they_draw_among_and_others_record_nothing(vocab):
    logits = np.random.default_rng(0).normal(0, 1.2, vocab)
    narrow = [Sampling(top_k=4), Sampling(top_k=8, top_p=0.7), Sampling(temperature=1.4, top_k=6, min_p=0.3)]
    token, logp, kept = draws(
        [*narrow, Sampling(), Sampling(top_k=9), Sampling(greedy=True)], count=8000, logits=logits
    )
    for row, sampling in enumerate(narrow):
        probability_V = softmax(logits / sampling.temperature)
        expected = nucleus(probability_V, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        assert {*kept[row].ravel().tolist()} - {-1} == expected
        assert ((kept[row] >= 0).sum(axis=-1) == len(expected)).all()
        wanted_V = np.where([one in expected for one in range(vocab)], probability_V, 0.0)
        wanted_V /= wanted_V.sum()
        assert chi_square(token[row], wanted_V) < 29.6  # at most 10 degrees of freedom, one in a thousand
        np.testing.assert_allclose(logp[row], np.log(wanted_V[token[row]]), atol=1e-5)
    assert (kept[len(narrow) :] == -1).all()
    np.testing.assert_allclose(logp[-3:], np.log(softmax(logits))[token[-3:]], atol=1e-5)


def test_ties_and_tokens_held_back_leave_no_more_than_top_k():
    logits = np.zeros(12)
    token, logp, kept = draws([Sampling(top_k=3, min_tokens=2)], count=500, logits=logits, position=1, stop=1)
    assert {*token.ravel().tolist()} == {*kept.ravel().tolist()} - {-1} == {0, 2, 3}
    np.testing.assert_allclose(logp, -np.log(3), atol=1e-6)


def scaled_logits(params, sequences) -> np.ndarray:
    """`[B, T, V]`, logits over the temperature that predict each token; of whole sequences, none packed."""
    position_BT = jnp.broadcast_to(jnp.arange(WIDTH), sequences.token_BT.shape)
    hidden = models.hidden_states(params, MODEL, sequences.token_BT, position_BT, jnp.ones_like(position_BT))
    logits_BTV = models.logits(params, MODEL, hidden.hidden_RWD) / SAMPLING.temperature
    return jnp.pad(logits_BTV[:, :-1], ((0, 0), (1, 0), (0, 0)))


def test_a_rollout_has_the_kept_tokens_and_probabilities_of_the_model_itself(params, rollout):
    sequences = rollout.sequences
    mask_BT, kept_BTK = sequences.mask_BT, sequences.recorded["kept"]
    assert kept_BTK.shape == (12, WIDTH, 8) and (kept_BTK[~mask_BT] == -1).all()
    logits_BTV = np.asarray(scaled_logits(params, sequences), np.float64)
    sizes = set()
    for b, t in zip(*np.nonzero(mask_BT), strict=True):
        logits_V = logits_BTV[b, t]
        if not mask_BT[b, t - SAMPLING.min_tokens]:  # one of the first
            logits_V = np.where(np.arange(40) == STOP, -np.inf, logits_V)
        expected = nucleus(softmax(logits_V), top_k=8, top_p=0.8, min_p=0.05)
        assert {*kept_BTK[b, t].tolist()} - {-1} == expected
        among = sorted(expected)
        logp = dict(zip(among, np.log(softmax(logits_V[among])), strict=True))
        assert abs(rollout.sampler_logp_BT[b, t] - logp[int(sequences.token_BT[b, t])]) < 1e-5
        sizes.add(len(expected))
    assert len(sizes) > 3


def test_packed_rows_have_the_samplers_probabilities_and_the_gradient_of_a_plain_softmax(params, rollout):
    packing = PackedArrays(rollout.sequences, rows=16, row_tokens=2 * WIDTH)
    rows = next(packing.rows())
    assert packing.microbatches == 1 and rows.shared_prefix is not None
    weight_BT = np.random.default_rng(1).normal(size=(2, 12, WIDTH)).astype(np.float32)
    logp_weight_RW, entropy_weight_RW = (packing.pack(each)[0] for each in weight_BT)

    @jax.jit
    def ours(params):
        prefix = {"shared_prefix": rows.shared_prefix}
        hidden = models.hidden_states(params, MODEL, rows.token_RW, rows.position_RW, rows.segment_RW, **prefix)
        tokens = hidden.hidden_RWD, rows.token_RW, rows.mask_RW
        how = {"kept_RWK": rows.recorded["kept"], "temperature": SAMPLING.temperature, "chunk_tokens": 64}
        read = models.token_logp(params, MODEL, *tokens, entropy=True, **how)
        loss = (logp_weight_RW * read.logp + entropy_weight_RW * read.entropy) * rows.mask_RW
        return loss.sum(), read.logp

    sequences = rollout.sequences
    kept_BTV = (sequences.recorded["kept"][..., None] == np.arange(40)).any(axis=2)

    @jax.jit
    def plain(params):
        logits_BTV = jnp.where(kept_BTV, scaled_logits(params, sequences), -1e9)
        logp_BTV = jax.nn.log_softmax(logits_BTV)
        chosen_BT = jnp.take_along_axis(logp_BTV, sequences.token_BT[..., None], axis=-1)[..., 0]
        entropy_BT = -(jnp.exp(logp_BTV) * logp_BTV).sum(axis=-1)
        return jnp.where(sequences.mask_BT, weight_BT[0] * chosen_BT + weight_BT[1] * entropy_BT, 0.0).sum()

    (loss, logp_RW), gradient = jax.value_and_grad(ours, has_aux=True)(params)
    np.testing.assert_allclose(packing.unpack(logp_RW[None]), rollout.sampler_logp_BT, atol=1e-5)
    expected, expected_gradient = jax.value_and_grad(plain)(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), gradient, expected_gradient)


def test_a_process_reward_starts_at_the_reference_among_the_kept_tokens():
    """Its log-ratio to the reference is its reward: both are over the same tokens, so that it begins at 0."""
    prime = PRIME(responses_per_update=16, process_reward=training())
    config = replace(get_config(), cold_start=None, algorithm=prime)
    roles = ("process_reward", "reference")
    pool = ResourcePool("all", tuple(jax.devices()[:1]))
    builder = Builder(config, embedded_tokenizer(), pool, roles, progress=lambda *_: None)
    workers = builder.workers(Phase(config, roles, 1))
    draw, shape = np.random.default_rng(0), (4, config.rollout.width)
    token_BT = draw.integers(4, 40, shape).astype(np.int32)
    kept_BTK = np.stack([token_BT, np.where(token_BT == 7, -1, 7)], axis=-1).astype(np.int32)
    mask_BT = np.broadcast_to(np.arange(shape[1]) >= config.rollout.max_prompt_tokens, shape)
    sequences = Sequences(token_BT, np.full(4, shape[1], np.int32), mask_BT, np.arange(4), recorded={"kept": kept_BTK})
    mine, theirs = (workers[role].log_prob(sequences) for role in roles)
    np.testing.assert_allclose(mine, theirs, atol=1e-6)
    assert np.abs(mine[mask_BT]).mean() < 1  # one of two tokens, and not of the vocabulary


def test_rollouts_of_which_the_kept_tokens_are_not_known_are_refused(refused):
    config = get_config()

    def sampled(environment=None, server=None, **settings):
        rollout = replace(config.rollout, sampling=Sampling(**settings), server=server)
        algorithm = GRPO(responses_per_update=16, correction=TruncatedImportance())
        return checked(replace(config, cold_start=None, algorithm=algorithm, rollout=rollout, environment=environment))

    tools, server = Tools(functions=("tools.py:calculator",)), RolloutServer(urls=("http://localhost:8000",))
    for settings in (
        {"min_p": 0.1},
        {"top_k": 5, "environment": tools},
        {"top_k": 5, "server": server},
        {"min_p": 1.0},
    ):
        with refused():
            sampled(**settings)
    assert sampled(top_k=64, top_p=0.9, min_p=0.1, min_tokens=2).rollout.sampling.most_kept == 64


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_run_over_eight_devices_has_one_truncated_distribution(tmp_path):
    config = get_config()
    config = replace(
        config,
        cold_start=None,
        algorithm=GRPO(responses_per_update=8, old_logp="trainer"),
        rollout=replace(config.rollout, sampling=Sampling(top_k=8, top_p=0.8, min_p=0.02)),
        actor=training(tensor=2, fsdp=2, generation_tensor=2),
        devices=8,
        steps=2,
        evaluation=Evaluation(every_steps=0),
        checkpoint=Checkpointing(every_steps=0),
        workdir=str(tmp_path),
    )
    run(config)
    for record in records(tmp_path / "metrics.jsonl"):
        assert record["sampler/logp_gap_max"] < 1e-4 and record["policy/kl_old_first"] < 1e-6
        assert 1 < record["sampler/kept_tokens"] <= 8
        assert record["policy/entropy"] < np.log(8)
