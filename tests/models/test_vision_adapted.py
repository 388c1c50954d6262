"""Checkpoints that see on eight devices, and with adapters in tower and decoder that peft loads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import seeing
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from tiny_checkpoints import tiered
from tiny_models import DECODER, close, merged

from jaxrlhf import models
from jaxrlhf.config import Lora, Optimizer, Refusal, Training
from jaxrlhf.models.huggingface.peft import load_adapters, save_adapters
from jaxrlhf.models.lora.lora import adapted, declare_adapters
from jaxrlhf.models.parameters import path_name
from jaxrlhf.sharding.mesh import BATCH_AXES, mesh_of
from jaxrlhf.sharding.rules import TRAIN, shardings
from tests.models.test_vision import Loaded

KINDS = tiered(seeing.KINDS, fast=(), slow=["gemma3"])
PARTS = [
    ("gemma3", Lora(rank=3, alpha=6.0, part="tower")),
    ("qwen2.5-vl", Lora(rank=3, alpha=6.0, targets=("output", "up", "down"), part="both")),
    ("qwen3-vl", Lora(rank=3, alpha=6.0, targets=("query", "down"))),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return functools.cache(lambda kind: Loaded(kind, tmp_path_factory.mktemp(kind)))


def rows_of(checkpoint):
    """Four rows: images twice, one image, text alone, and one image at the beginning."""
    parts = (4, (0,), 3, (1,), 4), (2, (1,), 7), (11,), ((0,), 5)
    sequences = [seeing.prompt(checkpoint.vision, *each, seed=seed) for seed, each in enumerate(parts)]
    return checkpoint.rows(sequences, [(row, 0) for row in range(4)], (4, len(sequences[0][0])))


def program(config, execution):
    """Logits of rows and gradients of a weighted sum of them, by all that is trained and what is frozen."""

    def loss(trained, params, lay, rows):
        *tokens, images = rows
        whole = adapted(params, trained) if lay else trained
        output = models.hidden_states(whole, config, *tokens, images=images, execution=execution)
        logit_RWV = models.logits(whole, config, output.hidden_RWD)
        weight_RWV = jnp.sin(jnp.arange(logit_RWV.size, dtype=jnp.float32)).reshape(logit_RWV.shape)
        return (jnp.where(tokens[2][..., None] > 0, logit_RWV, 0.0) * weight_RWV).sum(), logit_RWV

    return jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)


def told_by(gradients):
    """Gradients but those of keys' biases in the tower: all scores of a query move alike, so that they are rounding."""
    leaves = {path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(gradients)}
    return {name: leaf for name, leaf in leaves.items() if name != "vision.layers.attention.key_bias"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [None, "both"])
def test_eight_devices_say_what_one_says(loaded, kind, part):
    """Logits, and gradients of weights or adapters, of tower and decoder."""
    checkpoint = loaded(kind)
    config, rows = checkpoint.config, rows_of(checkpoint)
    lora = None if part is None else Lora(rank=2, alpha=4.0, targets=("output", "down"), part=part)
    mesh = mesh_of({"fsdp": 4, "tensor": 2}, jax.devices())
    dims = models.param_dims(config, "lm")
    trained, trained_dims = checkpoint.params, dims
    if lora is not None:
        declared = declare_adapters(config, "lm", lora)
        rng = np.random.default_rng(5)
        trained = jax.tree.map(lambda param: 0.2 * rng.standard_normal(param.shape).astype(np.float32), declared)
        trained_dims = jax.tree.map(lambda param: param.dims, declared)
    one = program(config, models.ONE_DEVICE)(trained, checkpoint.params, part is not None, rows)
    execution = models.Execution(remat=True, mesh=mesh, row_axes=BATCH_AXES, head_axes=("tensor",))
    placed = [
        jax.device_put(tree, shardings(mesh, names, TRAIN))
        for tree, names in ((trained, trained_dims), (checkpoint.params, dims))
    ]
    by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    many = program(config, execution)(*placed, part is not None, jax.device_put(rows, by_row))
    close(many[0], one[0], tolerance=3e-5)
    close(told_by(many[1]), told_by(one[1]), tolerance=3e-5)
    of_tower = [leaf for path, leaf in jax.tree.leaves_with_path(one[1]) if path_name(path).startswith("vision.")]
    assert of_tower and max(float(jnp.abs(leaf).max()) for leaf in of_tower) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), PARTS)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_adapters_of_tower_and_decoder(loaded, kind, lora, tmp_path):
    checkpoint = loaded(kind)
    config = checkpoint.config
    declared = declare_adapters(config, "lm", lora)
    rng = np.random.default_rng(5)
    adapters = jax.tree.map(lambda param: 0.3 * rng.standard_normal(param.shape).astype(np.float32), declared)
    save_adapters(adapters, config, "lm", lora, tmp_path, model=str(checkpoint.directory))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    again = load_adapters(tmp_path, config, "lm", lora, jax.tree.map(lambda _: device, declared))
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    theirs = peft.PeftModel.from_pretrained(seeing.build(kind), tmp_path).eval()
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert len([name for name, _ in theirs.named_parameters() if "lora_" in name]) == len(written) > 0
    sequence = seeing.prompt(checkpoint.vision, 4, (0,), 3, (1,), 4)
    expected = seeing.expected_logits(theirs, checkpoint.vision, *sequence, checkpoint.pixels)
    *tokens, images = checkpoint.rows([sequence], [(0, 0)], (1, len(sequence[0])))

    @jax.jit
    def run(params):
        return models.logits(params, config, models.hidden_states(params, config, *tokens, images=images).hidden_RWD)

    whole = adapted(checkpoint.params, again)
    for params in (whole, merged(whole)):
        np.testing.assert_allclose(run(params)[0], expected, atol=2e-4 if params is whole else 5e-4)
    assert np.abs(run(checkpoint.params)[0] - expected).max() > 0.05


def test_adapters_of_a_tower_without_one_or_without_its_rate_are_refused():
    with pytest.raises(Refusal, match="requires a model with a vision tower"):
        declare_adapters(DECODER, "lm", Lora(part="both"))
    with pytest.raises(Refusal, match="vision_learning_rate"):
        Training(lora=Lora(part="tower"))
    with pytest.raises(Refusal, match="vision_learning_rate"):
        Training(Optimizer(vision_learning_rate=1e-4), lora=Lora())
