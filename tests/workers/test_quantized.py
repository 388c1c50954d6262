"""Roles that train adapters beside quantised weights: what a device holds, and that layouts change nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import write_policy

from jaxrlhf.checkpoint import convert
from jaxrlhf.config import Config, FromScratch, Lora, Pretrained, Sampling
from jaxrlhf.data.sources import load_problems
from jaxrlhf.models.lora.quantized import Quantized
from jaxrlhf.workers import role_weights
from tests.workers.test_lora import actor_and_reference, build, config_of, experience, gradients, on_host, spread

pytestmark = pytest.mark.usefixtures("programs")

MODEL = FromScratch(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)


def quantized_config(kind: str = "nf4", **settings: int) -> Config:
    config = config_of(lora=Lora(rank=2, alpha=4.0, quantize=kind), **settings)
    return replace(config, model=MODEL)


def is_quantized(node) -> bool:
    return isinstance(node, Quantized)


def matrices(params) -> list[Quantized]:
    return [node for node in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(node)]


@pytest.fixture(scope="module")
def built() -> tuple[dict, int]:
    return actor_and_reference(quantized_config())


@pytest.mark.parametrize(("kind", "bits"), [pytest.param("int8", 8, marks=pytest.mark.seeds), ("nf4", 4)])
def test_a_device_holds_its_part_of_the_bits(kind, bits):
    _, workers = build(quantized_config(kind, devices=8, fsdp=2, stage=2, tensor=2), "actor")
    found = matrices(workers["actor"].parameters.tree)
    weights = 2 * (4 * 64 * 4 * 32 + 3 * 64 * 128)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(found)) == weights * bits // 8 + weights // 32 * 4
    for leaf in jax.tree.leaves(found):
        assert {shard.data.nbytes for shard in leaf.addressable_shards} == {leaf.nbytes // 8}


@pytest.mark.slow
def test_the_reference_is_the_quantised_actor_before_it_learnt_and_holds_no_bytes(built):
    workers, grown = built
    actor, reference, sequences = workers["actor"], workers["reference"], experience().sequences
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(actor.parameters.tree))
    assert grown == sum(leaf.nbytes for leaf in jax.tree.leaves([held.tree for held in actor.trees.values()]))
    assert len(matrices(actor.parameters.tree)) == 7
    floats = 4 * sum(np.prod(node.shape) for node in matrices(actor.parameters.tree))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(matrices(actor.parameters.tree))) < 0.16 * floats < held
    spread([actor])
    base = np.asarray(reference.compute_ref_log_prob(sequences))
    assert np.abs(actor.compute_log_prob(sequences) - base).max() > 0.01
    actor.adapters.tree = jax.tree.map(jnp.zeros_like, actor.adapters.tree)
    assert np.array_equal(actor.compute_log_prob(sequences), base)


@pytest.mark.parametrize(
    "converted",
    [
        pytest.param(False, marks=pytest.mark.slow, id="safetensors"),
        pytest.param(True, marks=pytest.mark.seeds, id="arrays"),
    ],
)
def test_a_matrix_is_quantised_before_the_next_is_loaded(converted, tmp_path, monkeypatch):
    path = write_policy(tmp_path)
    if converted:
        path, source = tmp_path / "converted", path
        convert(source, path)
    given, one = [], role_weights._quantized_leaf

    def spy(leaf, quantize):
        assert all(earlier.is_deleted() for earlier in given)
        made = one(leaf, quantize)
        if is_quantized(made) and made is not leaf:
            given.append(leaf)
        return made

    monkeypatch.setattr(role_weights, "_quantized_leaf", spy)
    config = replace(quantized_config(), model=Pretrained(str(path)))
    params = build(config, "actor")[1]["actor"].parameters.tree
    assert len(given) == len(matrices(params)) == 7
    assert all(leaf.dtype == jnp.float32 for leaf in given)


def test_a_split_within_a_tile_is_refused():
    with pytest.raises(ValueError, match=r"actor: .*'embed' dimension of 2 does not split 4 ways.*share.* a scale"):
        build(quantized_config(devices=4, fsdp=4), "actor")
    config = replace(
        quantized_config(devices=8, generation_tensor=8), model=replace(MODEL, num_heads=8, num_kv_heads=8)
    )
    with pytest.raises(ValueError, match=r"generation: .*'mlp' dimension of 4 does not split 8 ways.*lora\.quantize"):
        build(config, "actor")


@pytest.mark.slow
def test_gradients_on_eight_devices_are_those_of_one():
    alone = gradients(build(quantized_config(), "actor")[1])
    others = gradients(build(quantized_config(devices=8, fsdp=2, stage=2, tensor=2), "actor")[1])
    assert any(np.abs(leaf).max() > 1e-3 for leaf in alone)
    for one, other in zip(alone, others, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "kind", [pytest.param("int8", marks=pytest.mark.seeds), pytest.param("nf4", marks=pytest.mark.slow)]
)
def test_what_is_sampled_has_the_log_probabilities_that_are_trained_on(kind):
    config = quantized_config(kind, devices=8, fsdp=2, stage=2, tensor=2, generation_tensor=2)
    builder, workers = build(config, "actor")
    actor = workers["actor"]
    spread([actor])
    problems = load_problems(config.data, builder.on.tokenizer, split="train", max_prompt_tokens=64).problems[:8]
    before = on_host(actor.params)
    rollout = actor.generate_sequences(problems, Sampling(), responses_per_prompt=2, seed=3)
    assert all(np.array_equal(*pair) for pair in zip(on_host(actor.params), before, strict=True))
    mask_BT = rollout.sequences.mask_BT
    trained_BT = np.asarray(actor.compute_log_prob(rollout))
    np.testing.assert_allclose(rollout.sampler_logp_BT[mask_BT], trained_BT[mask_BT], atol=1e-5)


@pytest.mark.slow
def test_a_reference_of_its_own_layout_is_quantised_alike():
    config = replace(quantized_config(devices=2, tensor=2), reference_layout=replace(config_of().actor.layout, fsdp=2))
    workers, sequences = build(config, "actor", "reference")[1], experience().sequences
    actor = workers["actor"]
    actor.adapters.tree = jax.tree.map(jnp.zeros_like, actor.adapters.tree)
    reference = workers["reference"].compute_ref_log_prob(sequences)
    np.testing.assert_allclose(reference, actor.compute_log_prob(sequences), atol=1e-5)
    assert len(matrices(workers["reference"].params)) == 7
