"""Choices of experts recorded while sampling, and taken again by the trainer."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_arrays import PackedArrays
from tiny_models import SMALL, sharp

from jaxrlhf import models
from jaxrlhf.batch import Problem
from jaxrlhf.config import Lora, Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import Experts, LatentAttention, ModelConfig
from jaxrlhf.models.decoder import hidden_states
from jaxrlhf.models.lora.lora import adapted, declare_adapters
from jaxrlhf.sharding.mesh import mesh_of
from jaxrlhf.workers.generation.rollouts import to_rollout
from jaxrlhf.workers.router_replay import router_inputs, router_metrics

pytestmark = pytest.mark.usefixtures("programs")

MODEL = replace(SMALL, family="qwen3_moe", experts=Experts(6, 2, 8))
WIDTH = 20


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, sharp(MODEL, deviation=0.4))


def engine(model=MODEL, **options):
    return Engine(
        model,
        mesh_of({}, jax.devices()[:1]),
        slots=5,
        max_prompt_tokens=10,
        max_response_tokens=10,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=3,
        **options,
    )


@pytest.fixture(scope="module")
def rollout(params):
    """Ten responses in five slots to four prompts, most of them shared by several; lengths differ."""
    sampler = engine(records_routing=True)
    sampler.load(params, version=0)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 32, length).tolist()) for length in (1, 4, 7, 10)]
    asked = [prompts[index % 4] for index in range(10)]
    requests = [Request(index, prompt) for index, prompt in enumerate(asked)]
    completions = sampler.generate(requests, Sampling(), seed=1)
    assert len({len(completion.tokens) for completion in completions}) > 2
    problems = [Problem(index % 4, "", prompt) for index, prompt in enumerate(asked)]
    return to_rollout(problems, completions, width=WIDTH)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, rows, config=MODEL):
    return hidden_states(
        params,
        config,
        rows.token_RW,
        rows.position_RW,
        rows.segment_RW,
        shared_prefix=rows.shared_prefix,
        router=router_inputs(rows)._replace(replayed=rows.recorded.get("routing")),
    )


def packed(sequences):
    packing = PackedArrays(sequences, rows=16, row_tokens=WIDTH)
    assert packing.microbatches == 1
    return next(packing.rows()), packing


@pytest.mark.slow
def test_what_is_recorded_is_what_a_trainer_chooses_itself(params, rollout):
    sequences = rollout.sequences
    assert sequences.recorded["routing"].shape == (10, WIDTH, 2, 2)
    known_BT = np.arange(WIDTH) < sequences.length_B[:, None] - 1
    assert (sequences.recorded["routing"][known_BT] >= 0).all() and (
        sequences.recorded["routing"][~known_BT] == -1
    ).all()
    rows, packing = packed(sequences.replace(recorded={}))
    _, routed = forward(params, rows)
    for layer in range(2):
        for k in range(2):
            own_BT = packing.unpack(np.asarray(routed.choice_RWk)[None, layer, :, :, k])
            np.testing.assert_array_equal(own_BT[known_BT], sequences.recorded["routing"][known_BT][:, layer, k])


@pytest.mark.slow
def test_replaying_what_the_trainer_chooses_changes_nothing_and_other_choices_do(params, rollout):
    sequences = rollout.sequences
    plain, _ = packed(sequences.replace(recorded={}))
    rows, _ = packed(sequences)
    expected, _ = forward(params, plain)
    same, routed = forward(params, rows)
    np.testing.assert_allclose(same, expected, atol=1e-6)
    assert not disagreement(routed, rows).any()
    others = np.where(sequences.recorded["routing"] < 0, -1, (sequences.recorded["routing"] + 3) % 6).astype(np.int16)
    changed, routed = forward(params, packed(sequences.replace(recorded={"routing": others}))[0])
    assert np.abs(np.asarray(changed - expected)[np.asarray(rows.mask_RW)]).max() > 0.1
    rows, packing = packed(sequences.replace(recorded={"routing": others}))
    share_BT = packing.unpack(np.asarray(disagreement(routed, rows))[None])
    last_BT = np.arange(WIDTH) == sequences.length_B[:, None] - 1
    assert not share_BT[last_BT].any(), "nothing was recorded of a response's last token"
    naive = naive_disagreement(routed, rows, packing, others)
    np.testing.assert_allclose(share_BT[sequences.mask_BT & ~last_BT], naive[sequences.mask_BT & ~last_BT], atol=1e-6)


def disagreement(routed, rows):
    return router_metrics(routed, rows, MODEL, role="actor")["router/actor_disagreement"]


def naive_disagreement(routed, rows, packing, used_BTLk):
    """Share of a token's own choices, over layers, that were not among those used; counted one by one."""
    own = [
        [packing.unpack(np.asarray(routed.choice_RWk)[None, layer, :, :, k]) for k in range(2)] for layer in range(2)
    ]
    share_BT = np.zeros(used_BTLk.shape[:2])
    for b, t in np.ndindex(share_BT.shape):
        misses = [own[layer][k][b, t] not in used_BTLk[b, t, layer] for layer in range(2) for k in range(2)]
        share_BT[b, t] = sum(misses) / 4
    return share_BT


DEEPSEEK = ModelConfig(
    family="deepseek_v3",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=12,
    latent=LatentAttention(rank=8, rope_dim=4, value_dim=8),
    dense_layers=1,
    experts=Experts(
        8, 2, 8, shared_intermediate_size=8, scores="sigmoid", bias=True, groups=4, groups_per_token=2, group_best=2
    ),
)


@pytest.mark.parametrize(
    "kind", [pytest.param("deepseek", marks=pytest.mark.slow), pytest.param("adapters", marks=pytest.mark.seeds)]
)
def test_replay_agrees_on_equal_weights_and_not_on_others(kind):
    model = DEEPSEEK if kind == "deepseek" else MODEL
    lora = Lora(rank=2, targets=("query", "output"))
    declared = [models.declare(model, "lm"), *([declare_adapters(model, "lm", lora)] if kind == "adapters" else [])]
    rng = np.random.default_rng(5)
    # Adapters are sampled as large as they would be after long training.
    sampled = jax.tree.map(lambda param: jnp.asarray(0.4 * rng.standard_normal(param.shape), jnp.float32), declared)
    params = adapted(*sampled) if kind == "adapters" else sampled[0]
    sampler = engine(model, records_routing=True)
    sampler.load(params, version=0)
    prompts = [tuple(rng.integers(4, 32, length).tolist()) for length in (2, 9)]
    completions = sampler.generate([Request(n, prompts[n % 2]) for n in range(6)], Sampling(), seed=1)
    problems = [Problem(n % 2, "", prompts[n % 2]) for n in range(6)]
    sequences = to_rollout(problems, completions, width=WIDTH).sequences
    assert sequences.recorded["routing"].shape[2:] == (2, 2), "layers with experts, and experts of a token"
    rows, _ = packed(sequences)
    expected, _ = forward(params, packed(sequences.replace(recorded={}))[0], model)
    same, routed = forward(params, rows, model)
    np.testing.assert_allclose(same, expected, atol=1e-5)
    assert not np.asarray(router_metrics(routed, rows, model, role="actor")["router/actor_disagreement"]).any()
    # Without its adapters, or with routers that changed, the same model chooses others.
    sampled[0]["layers"]["mlp"]["router"] *= 1 if kind == "adapters" else -1
    _, routed = forward(sampled[0], rows, model)
    assert np.asarray(router_metrics(routed, rows, model, role="actor")["router/actor_disagreement"]).max() > 0.2


def test_a_model_without_experts_has_no_routing_to_record():
    dense = ModelConfig("qwen3", 32, 16, 32, 2, 4, 2, 8)
    with pytest.raises(
        ValueError, match="replay_routing=True records the chosen experts, but this model has no experts"
    ):
        engine(dense, records_routing=True)
