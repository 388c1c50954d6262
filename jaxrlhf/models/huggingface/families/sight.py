"""Type of a vision-language checkpoint format: a text family, and a vision tower stored in the same files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.models.config import ModelConfig, Vision
from jaxrlhf.models.huggingface.families.family import StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields, Link, written

TOWER = "vision."
"""Prefix of the names of a tower's tensors in our tables; files have other prefixes."""


_TOKENS = (
    Link("image_token_id", "image_token"),
    Link("video_token_id", "video_token"),
    Link("vision_start_token_id", "start_token"),
    Link("vision_end_token_id", "end_token"),
)


@dataclass(frozen=True)
class VisionFormat:
    """Format of vision-language checkpoints.

    Attributes:
      name: `model_type` of config.json.
      architecture: Name of the whole model's architecture.
      text: Family of the text part.
      text_type: `model_type` of the text part in config.json.
      prefixes: Prefixes of names in files that transformers writes, by our prefixes (text-only names and `TOWER`).
      tensors: Function that returns the table of the tower's parameters, by path in the tower.
      read: Function that builds the tower from the fields of `vision_config`, of `text_config` and of the whole file.
      write: Function that returns the fields of `vision_config`; None if config.json is always a copy of the source's.
      modules: Prefixes of names in transformers' model, by our prefixes.
      leaves_out: Prefixes of tensors that no forward pass reads.
    """

    name: str
    architecture: str
    text: str
    text_type: str
    prefixes: Mapping[str, str]
    tensors: Callable[[Vision], Mapping[str, StoredTensor]]
    read: Callable[[Fields, Mapping[str, Any], Mapping[str, Any]], Vision]
    write: Callable[[Vision], dict[str, Any]] | None = None
    modules: Mapping[str, str] = field(
        default_factory=lambda: {"model.": "model.language_model.", "vision.": "model.visual."}
    )
    leaves_out: tuple[str, ...] = ()

    def fields(self, config: ModelConfig, text: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a config.json of the whole model, from the fields of the text part."""
        vision = config.vision
        assert vision is not None and vision.sections is not None and self.write is not None
        outside = {name: text.pop(name) for name in ("architectures", "tie_word_embeddings", "dtype") if name in text}
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": list(vision.sections.pairs)}
        return outside | {
            "architectures": [self.architecture],
            "model_type": self.name,
            "text_config": text | {"model_type": self.text_type},
            "vision_config": self.write(vision),
            **written(vision, _TOKENS),
        }


def with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace a known prefix of a name by the prefix that `prefixes` has for it; other names are unchanged."""
    found = next((ours for ours in prefixes if name.startswith(ours)), "")
    return prefixes.get(found, "") + name.removeprefix(found)


def in_tower(prefix: str, **tensors: tuple[str, str, str]) -> dict[str, StoredTensor]:
    """Return a table of a tower's parameters: `attention__output=("attn.proj.weight", "NHD", "D NH")`."""
    return {
        path.replace("__", "."): StoredTensor(TOWER + prefix + name, dims, stored)
        for path, (name, dims, stored) in tensors.items()
    }


def joined_heads(name: str, width: int) -> dict[str, StoredTensor]:
    """Return a table of queries, keys and values that one tensor stacks along its rows, with a bias."""
    tensors, weight, bias = {}, f"{TOWER}{name}.weight", f"{TOWER}{name}.bias"
    for place, part in enumerate(("query", "key", "value")):
        rows = "NH", place * width, 3 * width
        tensors[f"layers.attention.{part}"] = StoredTensor(weight, "DNH", "NH D", inside=rows)
        tensors[f"layers.attention.{part}_bias"] = StoredTensor(bias, "NH", "NH", inside=rows)
    return tensors
