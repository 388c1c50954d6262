"""config.json of Gemma 3n and 4: layers that borrow keys and values, two kinds of heads, and refusals."""

import jax
import pytest

from jaxrlhf import models
from jaxrlhf.models.config import FullHeads, Pattern, Run
from jaxrlhf.sharding.mesh import STAGE_AXES, mesh_of
from tests.models.test_config_fields import _SHARED, read, refused

GEMMA4 = _SHARED | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 20,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
"""Fields of its own as transformers read them before layers had configurations of their own."""
GEMMA3N = _SHARED | {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_lr_multiplier": 1.0,
    "altup_num_inputs": 4,
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": [8192] * 30,
    "laurel_rank": 64,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 10,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        (GEMMA3N, {"altup_active_idx": 1}),
        (GEMMA3N, {"intermediate_size": [8192] * 29 + [4096]}),
        (GEMMA3N, {"activation_sparsity_pattern": [0.95] * 10}),
        (GEMMA4, {"enable_moe_block": True}),
        (GEMMA4, {"num_shared_experts": 1}),
        (GEMMA4, {"use_bidirectional_attention": "all"}),
        (GEMMA4, {"per_layer_config": {"0": {"head_dim": 512}}}),
        (GEMMA4, {"per_layer_config": {"4": {"num_attention_heads": 4}}}),
    ],
    ids=lambda fields: "" if len(fields) > 1 else next(iter(fields)),
)
def test_what_might_change_the_numbers_is_refused(tmp_path, fields, change):
    refused(tmp_path, fields, change)


def test_shapes_of_gemma_3n(tmp_path):
    config = read(tmp_path, GEMMA3N)
    own, borrowing = config.sections
    assert own == Pattern(4, (Run("sliding_layers", 4), Run("layers", 1)))
    assert borrowing == Pattern(2, (Run("sliding_borrowing_layers", 4), Run("borrowing_layers", 1)))
    assert (config.stream_width, config.laurel_rank, config.sparsity[9:11]) == (4 * 2048, 64, (0.95, 0.0))
    assert (config.rope_theta, config.sliding_rope_theta) == (1e6, 1e4)


def test_layers_that_borrow_keys_and_values_are_the_last_ones(tmp_path):
    config = read(tmp_path, GEMMA4)
    assert config.full_heads == FullHeads(kv_heads=1, head_dim=512, values_are_keys=True)
    own, borrowing = config.sections
    assert own == Pattern(3, (Run("sliding_layers", 4), Run("layers", 1)))
    assert borrowing == Pattern(4, (Run("sliding_borrowing_layers", 4), Run("borrowing_layers", 1)))
    assert (config.intermediate_size, config.borrowing_intermediate_size) == (6144, 12288)
    places = [str(index) for index, slides in enumerate(config.sliding_layers) if not slides]
    by_layer = {"per_layer_config": {at: {"head_dim": 512, "num_key_value_heads": 1} for at in places}}
    assert read(tmp_path, GEMMA4 | by_layer | {"global_head_dim": None}) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_shared_layers": 31}, "expected an earlier layer without a window"),
        ({"num_global_key_value_heads": 3}, r"num_heads=8 is not a multiple of full_heads\.kv_heads=3"),
        ({"sliding_window": None}, "full_heads requires sliding_window"),
    ],
)
def test_layers_that_cannot_borrow_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, GEMMA4 | change)


def test_layers_that_borrow_are_not_divided_over_stages(tmp_path):
    config = read(tmp_path, GEMMA4)
    pipeline = models.pipeline_over(mesh_of({"stage": 7}, jax.devices()[:7]), STAGE_AXES, row_axes=())
    staged = models.Execution(pipeline=pipeline)
    with pytest.raises(ValueError, match="do not split over 7 stages"):
        jax.eval_shape(lambda: models.unstack_layers({}, config, execution=staged))
