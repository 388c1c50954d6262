"""GGUF files of tiny models, written as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_checkpoints
import torch

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that byte-level vocabularies write as themselves."""
SPECIAL = ["<pad>", "<bos>", "<eos>"]
TEMPLATE = "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}"
SIZES = {"vocab_size": len(SPECIAL) + 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}

KINDS = {
    "llama": ("llama", "llama"),
    "llama3": ("llama3", "llama"),
    "llama-linear": ("llama-linear", "llama"),
    "qwen2": ("qwen2", "qwen2"),
    "qwen2-tied": ("qwen2-tied", "qwen2"),
    "qwen3": ("qwen3", "qwen3"),
    "gemma": ("gemma", "gemma"),
    "gemma2": ("gemma2", "gemma2"),
    "gemma3": ("gemma3", "gemma3"),
}
"""Kind of `tiny_checkpoints`, and the architecture's name in GGUF."""


def letters() -> list[str]:
    """The 256 bytes as byte-level vocabularies write them, in the order of bytes."""
    others = iter(range(256, 512))
    return [chr(byte) if byte in BYTES else chr(next(others)) for byte in range(256)]


def write_gguf(
    file: Path,
    model: torch.nn.Module,
    architecture: str,
    *,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    template: str | None = TEMPLATE,
    more: dict[str, Any] | None = None,
    cut: str = "gpt-2",
) -> Path:
    """Write a model of transformers, with a byte-level vocabulary.

    Args:
      matrices: Type of the matrices; vectors are float32, as the converter has them.
      template: Chat template; None writes none.
      more: Further values of the architecture.
      cut: Name of the rules that cut text before byte-pair encoding.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "attention.head_count_kv" not in (more or {}):
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else config.hidden_size // 4)
    writer.add_value_length(config.head_dim if hasattr(config, "head_dim") else config.hidden_size // 4)
    _add_ropes(writer, config)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for name, number in (more or {}).items():
        adds = {list: writer.add_array, float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}
        adds[type(number)](f"{architecture}.{name}", number)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([*SPECIAL, *letters(), "ab"])
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        array = tensor.detach().float().numpy()
        if architecture == "llama":
            array = _in_pairs(name, array, config)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        if array.ndim == 1 or matrices == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(theirs, np.ascontiguousarray(array))
        else:
            writer.add_tensor(theirs, gguf.quantize(np.ascontiguousarray(array), matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _in_pairs(name: str, array: np.ndarray, config) -> np.ndarray:
    """Rows of queries and keys with the two numbers beside each other that are rotated together."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            wide = array.reshape(count, 2, -1, *array.shape[1:])
            return np.moveaxis(wide, 1, 2).reshape(array.shape)
    return array


def _add_ropes(writer: gguf.GGUFWriter, config) -> None:
    """Rotary positions; Llama 3's as what each frequency is divided by."""
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        half = config.head_dim // 2
        stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** -(np.arange(half) / half)
        writer.add_tensor("rope_freqs.weight", (plain / stretched.numpy()).astype(np.float32))


def write_kind(
    file: Path, kind: str, *, sizes: dict[str, Any] | None = None, **options: Any
) -> tuple[Path, torch.nn.Module]:
    """A file of one of the `KINDS`, and the model of transformers that is in it.

    Args:
      sizes: Fields of its configuration that are others than usual.
    """
    which, architecture = KINDS[kind]
    given, sizes = sizes or {}, dict(SIZES)
    if kind == "llama3":  # published ones share this context, which the file does not say
        rope = {**tiny_checkpoints._STRETCHED, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
        sizes["rope_parameters"] = rope
    if architecture == "gemma3":
        sizes["rope_parameters"] = {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        sizes |= {"num_hidden_layers": 7, "layer_types": None}
    if architecture in ("gemma2", "gemma3"):
        sizes |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
    model = tiny_checkpoints.build(which, **sizes | given).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # or a mistaken offset would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return write_gguf(file, model, architecture, **options), model
