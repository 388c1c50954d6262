"""A mixture of experts against a loop over tokens and experts, and against the routers of transformers."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compiled import to_read
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxrlhf.models.config import Experts
from jaxrlhf.models.execution import ONE_DEVICE
from jaxrlhf.models.moe import grouped
from jaxrlhf.models.moe.experts import balance_loss, mix, route
from jaxrlhf.models.moe.grouped import grouped_mlp

WIDTH, INNER, ROWS, TOKENS = 6, 5, 4, 9
KINDS = {
    "renormalised": Experts(8, 2, INNER),
    "as they are": Experts(8, 3, INNER, normalised=False),
    "one of many": Experts(8, 1, INNER, normalised=False),
    "all": Experts(4, 4, INNER),
    "scaled sigmoid": Experts(8, 2, INNER, scores="sigmoid", scaling=2.5, bias=True),
    "groups": Experts(8, 2, INNER, scores="sigmoid", bias=True, groups=4, groups_per_token=2, group_best=2),
    "groups of one best": Experts(8, 3, INNER, normalised=False, scaling=4.0, groups=4, groups_per_token=2),
}


def weights(experts: Experts, seed: int = 0) -> dict:
    """Large enough that choices are clear, and a bias that matters."""
    draw = np.random.default_rng(seed).standard_normal
    count = experts.count
    shapes = {"gate": (count, WIDTH, INNER), "up": (count, WIDTH, INNER), "down": (count, INNER, WIDTH)}
    mlp = {"router": draw((WIDTH, count)), "experts": {name: 0.5 * draw(shape) for name, shape in shapes.items()}}
    if experts.bias:
        mlp["router_bias"] = 0.3 * draw(count)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), mlp)


def inputs(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, TOKENS, WIDTH)).astype(np.float32)


def naive_choice(mlp: dict, experts: Experts, token: np.ndarray) -> dict[int, float]:
    """Experts of one token and their weights, one comparison at a time."""
    logits = token.astype(np.float64) @ mlp["router"]
    softmax = experts.scores == "softmax"
    scores = np.exp(logits) / np.exp(logits).sum() if softmax else 1 / (1 + np.exp(-logits))
    ranked = scores + mlp.get("router_bias", 0.0)
    each = experts.count // experts.groups
    groups = [ranked[first : first + each] for first in range(0, experts.count, each)]
    worth = [sum(sorted(group)[-experts.group_best :]) for group in groups]
    open_groups = sorted(range(experts.groups), key=lambda group: -worth[group])[: experts.groups_per_token]
    allowed = [expert for expert in range(experts.count) if expert // each in open_groups]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: experts.per_token]
    total = sum(scores[expert] for expert in chosen) if experts.normalised else 1.0
    return {expert: experts.scaling * scores[expert] / total for expert in chosen}


def naive(mlp: dict, experts: Experts, normed_RWD: np.ndarray) -> np.ndarray:
    out = np.zeros(normed_RWD.shape)
    for place in np.ndindex(normed_RWD.shape[:2]):
        for expert, weight in naive_choice(mlp, experts, normed_RWD[place]).items():
            gate, up, down = (mlp["experts"][name][expert] for name in ("gate", "up", "down"))
            gated = normed_RWD[place] @ gate
            out[place] += weight * ((gated / (1 + np.exp(-gated)) * (normed_RWD[place] @ up)) @ down)
    return out


@functools.partial(jax.jit, static_argnames="experts")
def routed(mlp, normed_RWD, experts):
    return mix(mlp, normed_RWD, route(mlp, experts, normed_RWD), execution=ONE_DEVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_do_what_a_loop_over_tokens_does(kind):
    experts = KINDS[kind]
    mlp, normed_RWD = weights(experts), inputs()
    np.testing.assert_allclose(routed(mlp, normed_RWD, experts), naive(mlp, experts, normed_RWD), atol=2e-5)


def dense(mlp, normed_RWD, experts):
    """Every expert over every token, most of it multiplied by zero; JAX differentiates this by itself."""
    routing = route(mlp, experts, normed_RWD)
    chosen_RWkE = jax.nn.one_hot(routing.choice_RWk, experts.count)
    weight_RWE = jnp.einsum("RWk,RWkE->RWE", routing.weight_RWk, chosen_RWkE)
    gate_RWEF = jax.nn.silu(jnp.einsum("RWD,EDF->RWEF", normed_RWD, mlp["experts"]["gate"]))
    up_RWEF = jnp.einsum("RWD,EDF->RWEF", normed_RWD, mlp["experts"]["up"])
    return jnp.einsum("RWEF,EFD,RWE->RWD", gate_RWEF * up_RWEF, mlp["experts"]["down"], weight_RWE)


def slope(run):
    """Gradients of a sum with a weight for each entry, to all weights and to the input."""
    weight_RWD = np.random.default_rng(5).standard_normal((ROWS, TOKENS, WIDTH)).astype(np.float32)
    return jax.jit(jax.grad(lambda mlp, normed_RWD: (weight_RWD * run(mlp, normed_RWD)).sum(), argnums=(0, 1)))


def close(ours, theirs, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max())), ours, theirs)


def test_gradients_are_those_of_all_experts_over_all_tokens():
    experts = KINDS["groups"]
    mlp, normed_RWD = weights(experts), inputs()
    ours = slope(functools.partial(routed, experts=experts))(mlp, normed_RWD)
    theirs = slope(functools.partial(dense, experts=experts))(mlp, normed_RWD)
    assert np.abs(theirs[0]["router"]).max() > 0.01
    close(ours, theirs)


def test_however_rows_are_spread_over_experts_blocks_and_ragged_products_agree(monkeypatch):
    """Experts without a row, with less and more than a block; rows past the last belong to nobody."""
    rng = np.random.default_rng(0)
    shapes = (37, 6), (4, 6, 5), (4, 6, 5), (4, 5, 6), (37,)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def run(size_E, *arrays):
        out, pull = jax.vjp(lambda *arrays: grouped_mlp(*arrays, size_E), *arrays)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    blocks, ragged = jax.jit(run), jax.jit(lambda *arrays: run(*arrays))
    for sizes in (0, 0, 37, 0), (1, 8, 9, 17), (12, 0, 0, 0), (0, 0, 0, 0):
        size_E = np.array(sizes, np.int32)
        ours = blocks(size_E, *arrays)
        with monkeypatch.context() as patch:
            patch.setattr(grouped, "platform", lambda: "tpu")
            theirs = ragged(size_E, *arrays)
        assert not ours[0][sum(sizes) :].any()
        close(ours, theirs)


def test_nothing_is_computed_for_all_experts():
    """Neither rows nor inner activations ever exist once for each expert."""
    tokens, experts, width, inner = 256, 64, 32, 48
    shapes = [(tokens, width), (experts, width, inner), (experts, width, inner), (experts, inner, width), (tokens,)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    size_E = jax.ShapeDtypeStruct((experts,), jnp.int32)
    temporary = to_read(jax.jit(grouped_mlp).lower(*arrays, size_E)).memory_analysis().temp_size_in_bytes
    assert temporary < 4 * tokens * experts * width / 4


def their_router(kind, **fields):
    name = "V3" if kind is DeepseekV3TopkRouter else "V2"
    config = getattr(transformers, f"Deepseek{name}Config")(hidden_size=WIDTH, num_attention_heads=2, **fields)
    torch.manual_seed(0)
    router = kind(config)
    with torch.no_grad():
        router.weight.normal_()
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.normal_(std=0.3)
    return router


V3 = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
V2 = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0}


SIGMOID = {"scores": "sigmoid", "bias": True, "scaling": 2.5, "groups": 4, "groups_per_token": 2, "group_best": 2}
SOFTMAX = {"scores": "softmax", "normalised": False, "scaling": 4.0}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((DeepseekV3TopkRouter, V3 | {"norm_topk_prob": True}), SIGMOID),
        ((DeepseekV3TopkRouter, V3 | {"norm_topk_prob": False}), SIGMOID | {"normalised": False}),
        (
            (DeepseekV2TopkRouter, V2 | {"topk_method": "group_limited_greedy"}),
            SOFTMAX | {"groups": 4, "groups_per_token": 2},
        ),
        ((DeepseekV2TopkRouter, V2 | {"topk_method": "greedy"}), SOFTMAX),
    ],
    ids=["V3", "V3 as they are", "V2", "V2 greedy"],
)
def test_routers_of_deepseek_choose_and_weigh_as_in_transformers(theirs, ours):
    (kind, fields), experts = theirs, Experts(8, 3, INNER, **ours)
    router, normed_RWD = their_router(kind, **fields), inputs()
    with torch.no_grad():
        _, weight, choice = router(torch.tensor(normed_RWD))
    mlp = {"router": router.weight.detach().numpy().T}
    if experts.bias:
        mlp["router_bias"] = router.e_score_correction_bias.numpy()
    routing = route(mlp, experts, jnp.asarray(normed_RWD))
    ours = by_expert(routing.choice_RWk, routing.weight_RWk)
    np.testing.assert_allclose(ours, by_expert(choice.numpy(), weight.numpy()), atol=1e-6)


def by_expert(choice, weight):
    """`[tokens, 8]`, 0 where an expert was not chosen."""
    choice, weight = np.asarray(choice).reshape(-1, 3), np.asarray(weight).reshape(-1, 3)
    table = np.zeros((len(choice), 8))
    np.put_along_axis(table, choice, weight, axis=1)
    return table


def test_replayed_choices_are_used_and_weighed_anew():
    experts = KINDS["renormalised"]
    mlp, normed_RWD = weights(experts), inputs()
    own = route(mlp, experts, jnp.asarray(normed_RWD))
    alone = own.choice_RWk
    np.testing.assert_array_equal(own.own_RWk, alone)
    replayed_RWk = (np.asarray(alone) + 1) % experts.count
    replayed_RWk[:, 0] = -1  # nothing is known of the first token of a row
    routing = route(mlp, experts, jnp.asarray(normed_RWD), replayed_RWk=jnp.asarray(replayed_RWk))
    np.testing.assert_array_equal(routing.own_RWk, alone)
    np.testing.assert_array_equal(routing.choice_RWk[:, 1:], replayed_RWk[:, 1:])
    np.testing.assert_array_equal(routing.choice_RWk[:, 0], alone[:, 0])
    score_RWk = np.take_along_axis(np.asarray(own.probability_RWE), np.asarray(routing.choice_RWk), axis=-1)
    np.testing.assert_allclose(routing.weight_RWk, score_RWk / score_RWk.sum(-1, keepdims=True), rtol=1e-5)


def test_the_balancing_loss_of_a_sequence_is_that_of_transformers():
    """Two sequences of a row with padding and tokens that do not count; the other rows count nothing."""
    experts = KINDS["as they are"]
    mlp, normed_RWD = weights(experts), inputs()
    counted_RW = np.zeros((ROWS, TOKENS), np.int32)
    counted_RW[1] = [0, 1, 1, 1, 0, 2, 2, 0, 0]
    routing = route(mlp, experts, jnp.asarray(normed_RWD))
    loss_RW = np.asarray(balance_loss(routing, jnp.asarray(counted_RW)))
    assert not loss_RW[counted_RW == 0].any()
    logits = torch.tensor(normed_RWD[1] @ mlp["router"])
    for sequence in (1, 2):
        theirs = load_balancing_loss_func((logits,), 8, 3, torch.tensor(counted_RW[1:2] == sequence))
        np.testing.assert_allclose(loss_RW[counted_RW == sequence].mean(), theirs.item(), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_token": 9}, "per_token=9 is not in the range of the count=8"),
        ({"groups": 3}, "groups=3 with count=8 experts"),
        ({"groups": 4, "groups_per_token": 5}, "groups_per_token=5 of groups=4"),
        ({"groups": 4, "group_best": 3}, "at least group_best=3"),
        ({"groups": 8, "per_token": 2}, "at least per_token=2 experts"),
    ],
)
def test_routers_that_cannot_choose_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(Experts(8, 1, INNER), **changes)
