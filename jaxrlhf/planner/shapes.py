"""Shapes of well-known checkpoints, so that a plan needs neither their files nor a network."""

import difflib
from collections.abc import Mapping
from pathlib import Path

from jaxrlhf.config import Refusal
from jaxrlhf.models import read_config
from jaxrlhf.models.config import Experts, Llama3Rope, ModelConfig

_CLOSEST = 3


def _qwen25(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, vocab: int = 152_064, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        qkv_bias=True,
        tie_embeddings=tied,
        rope_theta=1e6,
        max_positions=32_768,
    )


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
        tie_embeddings=tied,
        rope_theta=1e6,
        max_positions=40_960,
    )


def _llama2(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    rope_theta: float = 1e4,
    max_positions: int = 4096,
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        rope_theta=rope_theta,
        max_positions=max_positions,
    )


def _llama3(
    hidden: int, intermediate: int, layers: int, heads: int, *, stretch: float = 8.0, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=hidden // heads,
        tie_embeddings=tied,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=Llama3Rope(stretch, 1.0, 4.0, 8192),
        max_positions=131_072,
    )


def _qwen3_moe(hidden: int, intermediate: int, layers: int, heads: int, *, expert: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        qk_norm=True,
        rope_theta=1e6,
        max_positions=40_960,
        experts=Experts(128, 8, expert, loss_coefficient=0.001),
    )


# Width, MLP width, layers, query heads and, where families differ in it, key-value heads.
_PRETRAINED_AND_INSTRUCT = {
    "Qwen/Qwen2.5-0.5B": _qwen25(896, 4864, 24, 14, 2, vocab=151_936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12, 2, vocab=151_936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen25(2048, 11_008, 36, 16, 2, vocab=151_936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen25(3584, 18_944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _qwen25(5120, 13_824, 48, 40, 8),
    "Qwen/Qwen2.5-32B": _qwen25(5120, 27_648, 64, 40, 8),
    "Qwen/Qwen2.5-72B": _qwen25(8192, 29_568, 80, 64, 8),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 14_336, 32, 32),
    "meta-llama/Llama-3.1-70B": _llama3(8192, 28_672, 80, 64),
    "meta-llama/Llama-3.1-405B": _llama3(16_384, 53_248, 126, 128),
    "meta-llama/Llama-3.2-1B": _llama3(2048, 8192, 16, 32, stretch=32.0, tied=True),
    "meta-llama/Llama-3.2-3B": _llama3(3072, 8192, 28, 24, stretch=32.0, tied=True),
}

SHAPES: Mapping[str, ModelConfig] = {
    **_PRETRAINED_AND_INSTRUCT,
    **{f"{name}-Instruct": shape for name, shape in _PRETRAINED_AND_INSTRUCT.items()},
    "meta-llama/Llama-3.3-70B-Instruct": _llama3(8192, 28_672, 80, 64),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 6144, 48, 32, expert=768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 12_288, 94, 64, expert=1536),
    "meta-llama/Llama-2-7b-hf": _llama2(4096, 11_008, 32, 32, 32),
    "meta-llama/Llama-2-13b-hf": _llama2(5120, 13_824, 40, 40, 40),
    "meta-llama/Llama-2-70b-hf": _llama2(8192, 28_672, 80, 64, 8),
    "codellama/CodeLlama-34b-hf": _llama2(8192, 22_016, 48, 64, 8, rope_theta=1e6, max_positions=16_384),
}
"""By hub id. A pretrained checkpoint has the entry of the instruct one; of Qwen2.5 some differ from it
in the longest sequence and the norms' epsilon, which a plan does not depend on. Source: their config.json."""


def shape_of(path: str) -> tuple[ModelConfig, str]:
    """The shape of a checkpoint, and where it is from in words.

    Args:
      path: A directory, or a hub id; the hub is asked only for ids that are not in `SHAPES`.

    Raises:
      Refusal: No such directory and no such id in the table or on a reachable hub, or a
        config.json that this decoder does not compute.
    """
    if Path(path).expanduser().is_dir():
        return read_config(path), f"config.json of {path}"
    if path in SHAPES:
        return SHAPES[path], "built-in table"
    try:
        return read_config(path), f"config.json of {path}"
    except ValueError as error:
        raise Refusal(f"{error}; {_hint(path)}") from error


def _hint(path: str) -> str:
    """The known ids that a wrong one may stand for."""
    lower = {name.lower(): name for name in SHAPES}
    if path.lower() in lower:
        return f"did you mean {lower[path.lower()]}? ids are case-sensitive"
    closest = difflib.get_close_matches(path.lower(), lower, n=_CLOSEST, cutoff=0.0)
    names = ", ".join(lower[name] for name in closest)
    return f"known without a network are {names} and {len(SHAPES) - len(closest)} more of Qwen2.5, Qwen3 and Llama"
