"""Tiny random checkpoints written by transformers, the independent side of every parity test."""

import json

import numpy as np
import pytest
import torch
import transformers

VOCAB = 97

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.5, 3.0],
    "long_factor": [2.0, 8.0],
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

_MSCALE = {"mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 8, "beta_slow": 2}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}

_SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}

_PATTERN = ["linear_attention", "full_attention"]
_LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}

_MAMBA = {
    "embedding_multiplier": 0.5,
    "residual_multiplier": 1.5,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.25,
    "shared_intermediate_size": 20,
    "mamba_n_heads": 16,
    "mamba_d_head": 4,
    "mamba_d_state": 6,
    "mamba_chunk_size": 16,
    "num_experts_per_tok": 3,
}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}

KINDS = {
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama": ("Llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _STRETCHED}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": _YARN}),
    "llama-linear": (
        "Llama",
        {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16, "num_key_value_heads": 1}),
    "phi3": ("Phi3", {"sliding_window": 9, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3-long": (
        "Phi3",
        {"tie_word_embeddings": True, "original_max_position_embeddings": 64, "rope_parameters": _LONG},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-grouped": ("Olmo2", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-uncapped": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": 50, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _GEMMA3_ROPE,
        },
    ),
    "gemma3-untied": ("Gemma3Text", {"head_dim": 8, "tie_word_embeddings": False, "final_logit_softcapping": 2.0}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 8,
        },
    ),
    "qwen3-moe-tied": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 20, "tie_word_embeddings": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 3, "sliding_window": 6}),
    "deepseek-v2": ("DeepseekV2", _DEEPSEEK | {"q_lora_rank": None, "rope_parameters": _YARN | _MSCALE}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        _DEEPSEEK | {"q_lora_rank": 10, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        _DEEPSEEK | {"q_lora_rank": 10, "num_hidden_layers": 3, "rope_parameters": _YARN | _MSCALE},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        _DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_theta": 1e4}},
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 6},
    ),
    "smollm3-full": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-moe": (
        "Glm4Moe",
        _SHARED_EXPERTS | {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1},
    ),
    "glm4-moe-plain": ("Glm4Moe", _SHARED_EXPERTS | {"first_k_dense_replace": 0, "norm_topk_prob": False}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.7, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "mistral4": (
        "Mistral4",
        _DEEPSEEK
        | {
            "q_lora_rank": 16,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.7, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 0.5,
            "residual_multiplier": 1.5,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 0.3,
            "rope_parameters": _YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
        },
    ),
    "qwen3-next": ("Qwen3Next", _LINEAR | _QWEN_EXPERTS | {"num_hidden_layers": 4, "layer_types": _PATTERN * 2}),
    "qwen3.5": ("Qwen3_5Text", _LINEAR | {"num_hidden_layers": 4, "layer_types": _PATTERN * 2}),
    "qwen3.5-once": (
        "Qwen3_5Text",
        _LINEAR
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", _LINEAR | _QWEN_EXPERTS | {"num_hidden_layers": 4}),
    "granite4": (
        "GraniteMoeHybrid",
        _MAMBA
        | {
            "layer_types": ["mamba", "attention"] * 2,
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "mamba_n_groups": 2,
        },
    ),
    "granite4-dense": (
        "GraniteMoeHybrid",
        _MAMBA
        | {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_hidden_layers": 4,
            "num_local_experts": 0,
            "mamba_d_conv": 3,
            "tie_word_embeddings": True,
        },
    ),
    "granite4-attention": (
        "GraniteMoeHybrid",
        _MAMBA | {"layer_types": ["attention"] * 2, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "deepseek-v3.2": (
        "DeepseekV32",
        _DEEPSEEK | {"q_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 128},
    ),
    "gemma4": (
        "Gemma4Text",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "head_dim": 8,
            "sliding_window": 6,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB - 7,
            "altup_num_inputs": 3,
            "laurel_rank": 6,
            "intermediate_size": 128,
            "activation_sparsity_pattern": [0.7, 0.0, 0.6, 0.0, 0.0],
        },
    ),
    "gemma4-moe": (
        "Gemma4Text",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
}
"""Every family, with its flags one way and another."""

RECENT = list(KINDS)[list(KINDS).index("olmo3") :]
FAST = (
    *("qwen2-window", "qwen3", "llama3", "phi3", "olmo2", "gemma2", "gemma3", "mixtral", "deepseek-v3", "smollm3"),
    *("granite", "gpt-oss"),
)
"""Kinds that have most mechanisms and compile fast; of others each mechanism is one of theirs too, or of the slow."""

SLOW = (
    *("mistral", "phi3-long", "qwen3-moe", "deepseek-v2", "deepseek-v3-halves"),
    *("mistral4", "qwen3-next", "granite4", "deepseek-v3.2", "gemma4", "gemma4-moe", "gemma3n"),
)
"""Kinds that show all other mechanisms, from long rope and the delta rule to several residual streams."""


def tiered(kinds, fast=FAST, slow=SLOW):
    """Kinds for `pytest.mark.parametrize`: those of the fast tests, of the slow ones, and others before a release."""
    marks = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(fast, ())
    return [pytest.param(kind, marks=marks.get(kind, pytest.mark.seeds)) for kind in kinds]


_CAUSAL = {
    "Gemma3Text": "Gemma3",
    "Gemma4Text": "Gemma4",
    "Gemma3nText": "Gemma3n",
    "Qwen3_5Text": "Qwen3_5",
    "Qwen3_5MoeText": "Qwen3_5Moe",
}
"""Names of language models that are not their configuration's."""


def model_class(kind, task="ForCausalLM"):
    """The class of a model; None where transformers has none for the task."""
    name, _ = KINDS[kind]
    return getattr(transformers, (_CAUSAL.get(name, name) if task == "ForCausalLM" else name) + task, None)


def build(kind, task="ForCausalLM", seed=0, **changes):
    """A transformers model with weights large enough that every part shows in the logits."""
    name, fields = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **fields, **changes})
    torch.manual_seed(seed)
    model = model_class(kind, task)(config).eval()
    with torch.no_grad():
        fixed = ("e_score_correction_bias", "layer_scalar")
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith(fixed)]
        for weight in [*model.parameters(), *biases]:
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def write(directory, model, **options):
    model.save_pretrained(directory, **options)
    return directory


def again(directory, **options):
    """The model of transformers that a checkpoint's config.json names, which `AutoModel` need not know."""
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    # With the attention of `build`: another kernel sums in another order.
    return getattr(transformers, name).from_pretrained(directory, attn_implementation="eager", **options)


def tokens(shape, seed=0):
    """Random ones that every checkpoint has."""
    return np.random.default_rng(seed).integers(1, VOCAB, shape, dtype=np.int32)
