"""Recent families against themselves: devices, shared prompts, chunks and adapters do not change a number."""

import functools

import jax
import numpy as np
import peft
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from tiny_checkpoints import KINDS, RECENT, build, tiered, write
from tiny_models import close, logits

from jaxrlhf import models
from jaxrlhf.config import Lora
from jaxrlhf.models.attention.shared_prefix import AttentionRows, SharedPrefix
from jaxrlhf.models.huggingface.peft import load_adapters
from jaxrlhf.models.lora.lora import adapted, declare_adapters
from jaxrlhf.sharding.mesh import BATCH_AXES, mesh_of
from jaxrlhf.sharding.rules import TRAIN, shardings
from tests.models.test_families import hidden_states, packed, program, tokens

FIRST = list({(KINDS[kind][0], "num_experts" in KINDS[kind][1]): kind for kind in reversed(RECENT)}.values())
"""The first kind of each family, and the first kind with experts of families that have both."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Model of transformers of each kind, its directory, and ours read from it."""

    @functools.cache
    def of(kind):
        theirs = build(kind)
        path = write(tmp_path_factory.mktemp(kind), theirs)
        config = models.read_config(path)
        return theirs, path, config, models.load_params(path, config, "lm")

    return of


@pytest.mark.parametrize("kind", tiered(FIRST, fast=(), slow=["deepseek-v3.2", "gemma3n"]))
def test_eight_devices_say_what_one_says(checkpoint, kind):
    _, _, config, params = checkpoint(kind)
    mesh, rows = mesh_of({"fsdp": 4, "tensor": 2}, jax.devices()), packed()
    by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    execution = models.Execution(remat=True, mesh=mesh, row_axes=BATCH_AXES, head_axes=("tensor",))
    layout = shardings(mesh, models.param_dims(config, "lm"), TRAIN)
    many = program(config, True, execution=execution)
    found = many(jax.device_put(params, layout), jax.device_put(rows, by_row))
    close(found, program(config, True)(params, rows), tolerance=3e-5)


def in_one_row(count, length):
    """Places of `count` responses of `length` tokens to a prompt of as many, and how attention finds them."""
    prompt, *responses = np.arange((count + 1) * length).reshape(count + 1, length)
    each = np.array([np.concatenate([prompt, response]) for response in responses])
    position_1W = np.concatenate([np.arange(2 * length), *[length + np.arange(length)] * (count - 1)])[None]
    first = np.arange(count * 2 * length) < 2 * length
    is_primary = first | (np.arange(count * 2 * length) % (2 * length) >= length)
    segment = np.repeat(np.arange(1, count + 1), 2 * length)
    source = each.reshape(1, 1, -1).astype(np.int32)
    rows = AttentionRows(source, segment[None, None].astype(np.int32), is_primary[None, None], np.ones(1, np.int32))
    return each, position_1W.astype(np.int32), SharedPrefix((rows,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", tiered(FIRST, fast=["gpt-oss"], slow=["qwen3-next", "granite4", "deepseek-v3.2", "gemma3n"])
)
def test_sequences_that_share_their_prompt_are_whole_ones(checkpoint, kind):
    """Hidden states and gradients, parameters of attention itself included."""
    _, _, config, params = checkpoint(kind)
    token_W = tokens()[0]
    each, position_1W, shared_prefix = in_one_row(2, 6)
    weight_SWD = np.random.default_rng(4).normal(size=(2, 12, config.hidden_size)).astype(np.float32)
    # A prompt tells once, so that its gradient is that of one of the two.
    weight_SWD[1, :6] = 0

    def shared(params):
        hidden_1WD = models.hidden_states(
            params, config, token_W[None], position_1W, np.ones_like(position_1W), shared_prefix=shared_prefix
        ).hidden_RWD
        return (hidden_1WD[0, each] * weight_SWD).sum(), hidden_1WD[0, each]

    def apart(params):
        hidden_SWD = hidden_states(params, config, token_W[each])
        return (hidden_SWD * weight_SWD).sum(), hidden_SWD

    found, expected = (jax.jit(jax.grad(function, has_aux=True))(params) for function in (shared, apart))
    # Of deep layers with the delta rule, a rounding of the weights alone moves gradients by up to 5e-4.
    close(found, expected, tolerance=1e-3 if config.linear else 3e-5)


@pytest.mark.parametrize("kind", tiered(FIRST, fast=(), slow=["deepseek-v3.2", "gemma3n"]))
def test_chunks_and_a_cache_give_what_whole_rows_give(checkpoint, kind):
    """Prompts in chunks, the last one shorter, then token by token."""
    _, _, config, params = checkpoint(kind)
    token_RW, length_R, each = tokens(), np.array([11, 7, 3, 10], np.int32), np.arange(4)

    def through(params, token_RW):
        first_RD, prefix, _ = models.prefill(params, config, token_RW[:, :11], length_R, chunk_tokens=4)
        cache = models.insert_prefix(models.empty_cache(config, slots=4, capacity=18), prefix, each, each)
        layers = models.unstack_layers(params, config)

        def step(cache, at_R):
            hidden_RD, cache, _ = models.decode(layers, params, config, token_RW[each, at_R], at_R, cache)
            return cache, hidden_RD

        return first_RD[None], jax.lax.scan(step, cache, length_R + np.arange(5)[:, None])[1]

    found_TRD = np.concatenate(jax.jit(through)(params, token_RW))
    whole_RWD = np.asarray(hidden_states(params, config, token_RW))
    expected = [whole_RWD[each, length_R - 1 + count] for count in range(6)]
    close(found_TRD, np.array(expected), tolerance=3e-5)


@pytest.mark.parametrize("kind", tiered(FIRST, fast=(), slow=["mistral4", "qwen3-next"]))
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft(checkpoint, kind, tmp_path):
    _, _, config, params = checkpoint(kind)
    lora = Lora(rank=3, alpha=6.0, targets=("query", "output"))
    targets = ["q_b_proj" if config.latent else "q_proj", "o_proj", *(["out_proj"] if config.linear else [])]
    settings = peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=targets, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(build(kind), settings)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = jax.tree.map(lambda _: device, declare_adapters(config, "lm", lora))
    adapters = load_adapters(tmp_path, config, "lm", lora, layout)
    token_RW = tokens() + 1
    with torch.no_grad():
        expected = theirs(torch.tensor(token_RW, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits(adapted(params, adapters), config, token_RW), expected, atol=1e-4)
    assert np.abs(expected - logits(params, config, token_RW)).max() > 0.03
