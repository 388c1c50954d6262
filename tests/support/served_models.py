"""A served model small enough for tests: the embedded tokenizer, random weights and one program of each kind."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from jaxrlhf import models
from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.data.tokenizer import decoder, embedded_tokenizer
from jaxrlhf.engine import Engine, EngineService
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.server import Server

TOKEN = "a-key"
CONTEXT, RESPONSE = 512, 128


def build_engine(tokenizer) -> Engine:
    config = ModelConfig(
        family="qwen2",
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
    )
    rng = np.random.default_rng(0)
    shapes = models.param_shapes(config, "lm")
    params = jax.tree.map(lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", CONTEXT - RESPONSE)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", CONTEXT)
        engine = Engine(
            config,
            jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,)),
            slots=8,
            max_prompt_tokens=CONTEXT - RESPONSE,
            max_response_tokens=RESPONSE,
            stop_tokens=(tokenizer.eos_token_id,),
            decode_tokens_per_dispatch=8,
            slot_axes=("data",),
            decode=decoder(tokenizer),
        )
    engine.load(jax.device_put(params, jax.devices()[0]), version=4)
    return engine


@contextmanager
def served(limits: ServingLimits | None = None, *, token: str | None = TOKEN, engine: Engine | None = None):
    """Yield a server, and its model."""
    tokenizer = embedded_tokenizer()
    with EngineService(engine or build_engine(tokenizer)) as service:
        stops = (tokenizer.eos_token_id,)
        model = ServedModel("tiny", service, tokenizer, stops, limits or ServingLimits())
        with Server(model, token=token) as server:
            yield server, model
