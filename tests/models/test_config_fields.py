"""config.json of published checkpoints is read to their published size; what might change numbers is refused."""

import json

import pytest
from tiny_checkpoints import build, write

from jaxrlhf import models
from jaxrlhf.models.config import LongRope
from jaxrlhf.models.counts import weight_counts

_SHARED = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.4",
    "use_cache": True,
}
MISTRAL = _SHARED | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
LLAMA2 = _SHARED | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
PHI4 = _SHARED | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "pad_token_id": 100349,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
PHI4_MINI = PHI4 | {
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
OLMO2 = _SHARED | {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
GEMMA2 = _SHARED | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3 = {name: value for name, value in GEMMA2.items() if name != "hidden_act"} | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
DEEPSEEK_V2_LITE = _SHARED | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
GPT_OSS_20B = _SHARED | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
_LINEAR = {"rope_type": "linear", "factor": 8.0}
PUBLISHED = {
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "Mistral-7B-v0.3": (MISTRAL, 7_248_023_552),
    "Llama-2-7b": (LLAMA2, 6_738_415_616),
    "phi-4": (PHI4, 14_659_507_200),
    "Phi-4-mini": (PHI4_MINI, 3_836_021_760),
    "OLMo-2-1124-7B": (OLMO2, 7_298_617_344),
    "gemma-2-2b": (GEMMA2, 2_614_341_888),
    "gemma-3-1b": (GEMMA3, 999_885_952),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
}


def read(directory, fields):
    (directory / "config.json").write_text(json.dumps(fields))
    return models.read_config(directory)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_have_their_published_size(tmp_path, name):
    fields, parameters = PUBLISHED[name]
    assert weight_counts(read(tmp_path, fields)).total == parameters


def test_windows_of_published_checkpoints(tmp_path):
    assert read(tmp_path, MISTRAL).sliding_window is None
    first = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    assert read(tmp_path, first).sliding_window == 4096  # what Mistral's first release stands for
    gemma2, gemma3 = read(tmp_path, GEMMA2), read(tmp_path, GEMMA3)
    assert gemma2.sliding_layers == (True, False) * 13
    assert gemma3.sliding_layers == ((True,) * 5 + (False,)) * 4 + (True,) * 2
    assert (gemma3.rope_theta, gemma3.sliding_rope_theta, gemma3.sliding_window) == (1e6, 1e4, 512)


def test_a_context_that_changes_all_tokens_is_kept_to(tmp_path):
    config = read(tmp_path, PHI4_MINI)
    assert isinstance(config.rope_scaling, LongRope) and config.max_positions == 4096
    assert config.rope_scaling.short_factor == (1.0,) * 48 and config.rotary_dim == 96
    # sqrt(1 + ln(131072 / 4096) / ln 4096)
    assert config.rope_scaling.attention_factor == pytest.approx(1.1902380714238083)


def refused(directory, fields, change):
    """Read the fields, and have them refused with a change, by its name."""
    read(directory, fields)
    (name,) = change
    with pytest.raises(ValueError) as error:
        read(directory, fields | change)
    message = str(error.value)
    assert "config.json" in message and "\n" not in message
    assert ("rope" if "rope" in name else name) in message


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        (GEMMA2, {"hidden_activation": "gelu"}),
        (GEMMA2, {"attention_bias": True}),
        (GEMMA2, {"use_bidirectional_attention": True}),
        (GEMMA2, {"layer_types": ["full_attention"] * 25}),
        (GEMMA2, {"layer_types": ["chunked_attention"] * 26}),
        (GEMMA3, {"attn_logit_softcapping": 50.0}),
        (GEMMA3, {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}),
        (GEMMA3, {"rope_parameters": {"rope_theta": 5.0}}),
        (GEMMA3 | {"rope_scaling": _LINEAR}, {"rope_parameters": {"full_attention": _LINEAR | {"factor": 4.0}}}),
        (GPT_OSS_20B, {"rope_scaling": None}),
        (OLMO2, {"attention_bias": True}),
        (LLAMA2, {"mlp_bias": True}),
        (OLMO2, {"clip_qkv": 8.0}),
        (PHI4_MINI, {"rope_scaling": {"short_factor": [1.0] * 48, "type": "longrope"}}),
        (PHI4, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        (MISTRAL, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "ntk": 3.0}}),
        (MISTRAL, {"logit_scale": 0.5}),
        (MISTRAL, {"rms_norm_eps": None}),
        (MISTRAL, {"is_decoder": True}),
        (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}),
        (DEEPSEEK_V2_LITE, {"hidden_act": "gelu_pytorch_tanh"}),
    ],
    ids=lambda fields: "" if len(fields) > 1 else next(iter(fields)),
)
def test_what_might_change_the_numbers_is_refused(tmp_path, fields, change):
    refused(tmp_path, fields, change)


@pytest.mark.parametrize(
    "change",
    [
        {"mamba_conv_bias": False},
        {"mamba_proj_bias": True},
        {"mamba_d_head": 5},
        {"time_step_limit": [0.01, 0.1]},
        {"position_embedding_type": "learned"},
        {"layer_types": ["mamba", "attention"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_state_spaces_of_another_form_are_refused(tmp_path, change):
    source = write(tmp_path, build("granite4"))
    refused(tmp_path, json.loads((source / "config.json").read_text()), change)


def test_sparse_attention_that_sees_all_tokens_says_so(tmp_path):
    source = write(tmp_path, build("deepseek-v3.2"))
    fields = json.loads((source / "config.json").read_text())
    with pytest.warns(RuntimeWarning, match="sequences of more than index_topk=16 tokens get logits that differ"):
        read(tmp_path, fields | {"index_topk": 16})


def test_a_field_that_is_null_says_nothing(tmp_path):
    assert read(tmp_path, OLMO2 | {"clip_qkv": None}) == read(tmp_path, OLMO2)
    qwen = MISTRAL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64}
    qwen |= {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 16}
    assert read(tmp_path, qwen | {"max_window_layers": None}) == read(tmp_path, qwen)
