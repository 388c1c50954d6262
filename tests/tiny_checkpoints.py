"""Tiny random checkpoints written by transformers, the independent side of every parity test."""

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

KINDS = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama": ("Llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _STRETCHED}),
}


def build(kind, task="ForCausalLM", seed=0, **changes):
    """A transformers model with weights large enough that every part shows in the logits."""
    name, fields = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **fields, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, name + task)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def write(directory, model, **options):
    model.save_pretrained(directory, **options)
    return directory
