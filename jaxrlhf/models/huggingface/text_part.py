"""The text part of a checkpoint that sees or hears: its fields and tensors, as a checkpoint without towers has them."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrlhf.models.huggingface.families import FAMILIES

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}
"""Beginnings of the names of its tensors, and those in a checkpoint that is text alone."""

_OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
"""Names that published files have for a family."""

_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "transformers_version")
"""Fields that count for the text part where the whole model says them."""


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text part, as its own config.json would have them; all of them where there are no parts."""
    text = fields.get("text_config")
    name = str(text.get("model_type")) if isinstance(text, dict) else ""
    name = _OTHER_NAMES.get(name, name)
    if not isinstance(text, dict) or name not in FAMILIES:
        return dict(fields)
    whole = {name: fields[name] for name in _OF_THE_WHOLE if fields.get(name) is not None}
    return text | whole | {"architectures": [FAMILIES[name].causal], "model_type": name}


def text_tensors(names: Iterable[str]) -> dict[str, str]:
    """Names of the tensors of the text part in their files, by those in a checkpoint that is text alone."""
    names = list(names)
    if not any(name.startswith(prefix) for name in names for prefix in _PREFIXES if "language_model" in prefix):
        return {name: name for name in names}
    return {
        ours + name.removeprefix(theirs): name
        for name in names
        for theirs, ours in _PREFIXES.items()
        if name.startswith(theirs)
    }
