"""The estimates of the settings table, against what XLA says a compiled update needs."""

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf import models
from jaxrlhf.architecture import ModelConfig
from jaxrlhf.parallel import activation_bytes, logit_bytes


@pytest.mark.parametrize("remat", [False, True])
def test_activations_and_logits_are_about_what_xla_allocates(remat: bool) -> None:
    config = ModelConfig("qwen2", 512, 128, 384, 6, 4, 4, 32, qkv_bias=True, tie_embeddings=True)
    rows, width = 8, 256
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def loss(params, token, position, segment):
        hidden = models.hidden_states(params, config, token, position, segment, remat=remat, dtype=jnp.float32)
        return models.token_logp(params, config, hidden, token, temperature=1.0).logp.sum()

    shapes = models.param_shapes(config, "lm")
    compiled = jax.jit(jax.value_and_grad(loss)).lower(shapes, ints, ints, ints).compile()
    allocated = compiled.memory_analysis().temp_size_in_bytes
    estimated = activation_bytes(config, tokens=rows * width, row_tokens=width, itemsize=4, remat=remat)
    estimated += logit_bytes(config, tokens=rows * width)
    assert 0.5 < estimated / allocated < 2
