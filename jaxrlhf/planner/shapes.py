"""Shapes of well-known checkpoints, so that planning needs neither their files nor a network."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.models import read_config
from jaxrlhf.models.config import Experts, LatentAttention, Llama3Rope, ModelConfig

_CLOSEST = 3


def _read_table() -> dict[str, ModelConfig]:
    table = tomllib.loads(Path(__file__).with_name("checkpoints.toml").read_text(encoding="utf-8"))
    shapes: dict[str, ModelConfig] = {}
    for name, own in table["checkpoints"].items():
        like = own.pop("like")
        names = [name, f"{name}-Instruct"] if own.pop("instruct", False) else [name]
        shapes |= dict.fromkeys(names, _shape({"family": like, **table["families"][like]}, own))
    return shapes


def _shape(family: Mapping[str, Any], own: Mapping[str, Any]) -> ModelConfig:
    """Build the shape of a checkpoint from the fields of its family and its own fields."""
    fields = {"head_dim": own["hidden_size"] // own["num_heads"], **family, **own}
    for name, kind in (("rope_scaling", Llama3Rope), ("experts", Experts), ("latent", LatentAttention)):
        if name in fields:
            fields[name] = kind(**{**family.get(name, {}), **own.get(name, {})})
    return ModelConfig(**fields)


SHAPES: Mapping[str, ModelConfig] = _read_table()
"""Shapes of known checkpoints, by hub id."""


def shape_of(path: str) -> tuple[ModelConfig, str]:
    """Return the shape of a checkpoint, and its source in words.

    Args:
      path: Directory, GGUF file, or hub id; the hub is contacted only for ids that are not in `SHAPES`.

    Raises:
      Refusal: The directory does not exist and the id is neither in the table nor on a reachable hub, or the decoder
        does not support the config.json.
    """
    if Path(path).expanduser().exists():
        return read_config(path), f"config.json of {path}"
    if path in SHAPES:
        return SHAPES[path], "built-in table"
    try:
        return read_config(path), f"config.json of {path}"
    except ValueError as error:
        raise Refusal(f"{error}; {_hint(path)}") from error


def _hint(path: str) -> str:
    """Return a hint with known ids that are similar to an unknown id."""
    lower = {name.lower(): name for name in SHAPES}
    if path.lower() in lower:
        return f"did you mean {lower[path.lower()]}? ids are case-sensitive"
    closest = difflib.get_close_matches(path.lower(), lower, n=_CLOSEST, cutoff=0.0)
    names = ", ".join(lower[name] for name in closest)
    others = len(SHAPES) - len(closest)
    return f"without a network, the known ids are {names} and {others} more of Qwen2.5, Qwen3, Llama and DeepSeek"
