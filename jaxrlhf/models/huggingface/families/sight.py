"""The type of a checkpoint that sees: a family of text, and a tower whose tensors lie beside its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.models.config import ModelConfig, Vision
from jaxrlhf.models.huggingface.families.family import StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields

TOWER = "vision."
"""Beginning of the names of a tower's tensors here; files have beginnings of their own."""


def _ids(vision: Vision) -> dict[str, Any]:
    return {
        "image_token_id": vision.image_token,
        "video_token_id": vision.video_token,
        "vision_start_token_id": vision.start_token,
        "vision_end_token_id": vision.end_token,
    }


@dataclass(frozen=True)
class Sight:
    """One format of checkpoints that see.

    Attributes:
      name: `model_type` of its config.json.
      architecture: Name of the whole model.
      text: Family of its text part.
      text_type: `model_type` of that in the file.
      prefixes: Beginnings of names in files that transformers writes, by those of text alone and of `TOWER`.
      tensors: Table of the tower's parameters, by their paths in the tower.
      read: Tower of the fields of `vision_config`, of `text_config` and of the whole.
      write: Fields of `vision_config`.
      beside: Fields of the whole that say how its parts belong together, ids of tokens among them.
      modules: Beginnings of names in transformers' model, by those here.
      leaves_out: Beginnings of tensors that no forward pass reads.
    """

    name: str
    architecture: str
    text: str
    text_type: str
    prefixes: Mapping[str, str]
    tensors: Callable[[Vision], Mapping[str, StoredTensor]]
    read: Callable[[Fields, Mapping[str, Any], Mapping[str, Any]], Vision]
    write: Callable[[Vision], dict[str, Any]]
    beside: Callable[[Vision], dict[str, Any]] = _ids
    modules: Mapping[str, str] = field(
        default_factory=lambda: {"model.": "model.language_model.", "vision.": "model.visual."}
    )
    leaves_out: tuple[str, ...] = ()

    def fields(self, config: ModelConfig, text: dict[str, Any]) -> dict[str, Any]:
        """The fields of a config.json of the whole, from those of the text part."""
        vision = config.vision
        assert vision is not None
        outside = {name: text.pop(name) for name in ("architectures", "tie_word_embeddings", "dtype") if name in text}
        if vision.sections is not None:
            text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": list(vision.sections.pairs)}
            if vision.sections.interleaved:
                text["rope_parameters"]["mrope_interleaved"] = True
        return outside | {
            "architectures": [self.architecture],
            "model_type": self.name,
            "text_config": text | {"model_type": self.text_type},
            "vision_config": self.write(vision),
            **{name: value for name, value in self.beside(vision).items() if value is not None},
        }


def begun(name: str, beginnings: Mapping[str, str]) -> str:
    """The name with another beginning, if it has one of those that are known."""
    found = next((ours for ours in beginnings if name.startswith(ours)), "")
    return beginnings.get(found, "") + name.removeprefix(found)


def in_tower(prefix: str, **tensors: tuple[str, str, str]) -> dict[str, StoredTensor]:
    """A table of parameters of a tower: `attention__output=("attn.proj.weight", "NHD", "D NH")`."""
    return {
        path.replace("__", "."): StoredTensor(TOWER + prefix + name, dims, stored)
        for path, (name, dims, stored) in tensors.items()
    }


def joined_heads(name: str, width: int) -> dict[str, StoredTensor]:
    """Queries, keys and values above each other in one tensor with a bias."""
    names = ("query", "key", "value")
    tensors = {
        f"layers.attention.{part}": StoredTensor(f"{TOWER}{name}.weight", "DNH", "NH D", place * width, 3 * width)
        for place, part in enumerate(names)
    }
    return tensors | {
        f"layers.attention.{part}_bias": StoredTensor(f"{TOWER}{name}.bias", "NH", "NH", place * width, 3 * width)
        for place, part in enumerate(names)
    }
