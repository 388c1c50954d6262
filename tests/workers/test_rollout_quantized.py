"""Generation by rounded weights: what the switch moves, what samples differ by, and that a policy learns from them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import collectives
from learning_run import learning
from tiny_runs import get_config, numbers

import jaxrlhf
from jaxrlhf.config import GRPO, PPO, SFT, Config, FromScratch, Lora, Pool, Training, TruncatedImportance, checked
from jaxrlhf.models.lora.quantized import Quantized, quantize
from tests.workers.test_lora import build, config_of

pytestmark = pytest.mark.usefixtures("programs")

MODEL = FromScratch(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32)
MATRICES = 2 * (4 * 64 * 4 * 32 + 3 * 64 * 128)
SPLIT = {"fsdp": 2, "stage": 2, "tensor": 2}


def config(kind: str, **layout: int) -> Config:
    made = config_of(lora=None, devices=8, **layout)
    corrected = replace(made.algorithm, correction=TruncatedImportance())
    return replace(made, model=MODEL, algorithm=corrected, rollout=replace(made.rollout, quantize=kind))


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.seeds)])
def test_the_switch_rounds_where_weights_lie_and_moves_their_bytes(kind):
    builder, workers = build(config(kind, **SPLIT), "actor")
    hybrid, trained = builder.hybrid, {"parameters": workers["actor"].parameters.tree}
    masters = jax.device_get(trained["parameters"]["layers"])
    made, _ = hybrid.to_generation(trained)
    weights = jax.device_get(made["parameters"]["layers"])
    # Of every matrix a device has an eighth, and generates with all: 7 of 8 bytes come, a scale of 4 for 32 of them.
    rounded = 7 / 8 * (MATRICES + 4 * MATRICES / 32)
    switched = [found for program in hybrid.lower().to_generation for found in collectives(program)]
    in_few_bits = sum(found.received_bytes for found in switched)
    assert in_few_bits == hybrid.bytes_per_device
    others = hybrid.bytes_per_device - rounded
    assert 0 < others < rounded  # embeddings and biases, which stay float32
    for path, own in jax.tree.leaves_with_path(weights, is_leaf=lambda node: isinstance(node, Quantized)):
        if isinstance(own, Quantized):
            master = masters[path[0].key][path[1].key]
            expected = jax.device_get(quantize(jnp.asarray(master), kind))
            np.testing.assert_array_equal(own.value, expected.value)
            np.testing.assert_array_equal(own.scale, expected.scale)
    back, _ = hybrid.to_training(made, trained)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back["parameters"]["layers"]), masters)


def test_what_nothing_corrects_or_rounds_is_refused(refused):
    plain = get_config()
    rounded = replace(plain.rollout, quantize="int8")
    corrected = PPO(correction=TruncatedImportance())
    with refused():
        checked(replace(plain, algorithm=PPO(), rollout=rounded))
    with refused():
        checked(replace(plain, algorithm=SFT(), cold_start=None, rollout=rounded))
    with refused():
        checked(replace(plain, algorithm=corrected, rollout=rounded, actor=Training(lora=Lora(quantize="nf4"))))
    with refused():
        build(config("int8", tensor=8), "actor")  # of 128 columns a device would have half a scale


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_policy_learns_from_rounded_samples(tmp_path):
    exact = learning(GRPO, correction=TruncatedImportance())
    rounded = replace(exact, rollout=replace(exact.rollout, quantize="int8"), workdir=str(tmp_path))
    assert jaxrlhf.run(rounded).finished
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert np.mean([record["score/mean"] for record in records[-3:]]) > 0.8
    gaps = [record["sampler/logp_gap_mean"] for record in records]
    assert min(gaps) > 1e-5 and max(gaps) < 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_pool_apart_samples_what_the_actors_own_devices_sample(tmp_path):
    """It receives weights of the compute dtype, and rounds them as the switch does."""
    exact = replace(learning(GRPO, correction=TruncatedImportance()), steps=2, devices=None)
    rounded = replace(exact, rollout=replace(exact.rollout, quantize="int8"))
    apart = Pool("train", 1, ("actor",)), Pool("own", 1, ("rollout", "reward"))
    for name, pools in (("together", (Pool("all", 1, ("actor", "reward")),)), ("apart", apart)):
        assert jaxrlhf.run(replace(rounded, pools=pools, workdir=str(tmp_path / name))).finished
    together, apart = (numbers(tmp_path / name / "metrics.jsonl") for name in ("together", "apart"))
    assert together[0]["sampler/logp_gap_mean"] > 1e-5
    assert {"score/mean", "sampler/logp_gap_mean", "actor/grad_norm"} <= together[-1].keys() & apart[-1].keys()
    for one, other in zip(together, apart, strict=True):
        assert {name: one[name] for name in one.keys() & other.keys()} == {
            name: other[name] for name in one.keys() & other.keys()
        }
    assert (tmp_path / "together/samples.jsonl").read_bytes() == (tmp_path / "apart/samples.jsonl").read_bytes()
