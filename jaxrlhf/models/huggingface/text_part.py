"""Parts of a multimodal checkpoint: its text part, as in a text-only checkpoint, and its vision tower."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.models.config import Vision
from jaxrlhf.models.huggingface.families import FAMILIES, VISION_FORMATS, Fields, VisionFormat
from jaxrlhf.models.huggingface.families.rope_fields import OF_IMAGES

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}
"""Prefixes of tensor names in a multimodal checkpoint, and the prefixes in a text-only checkpoint."""

_TOWERS = {
    "model.visual.": "vision.",
    "visual.": "vision.",
    "model.vision_tower.": "vision.tower.",
    "vision_tower.": "vision.tower.",
    "model.multi_modal_projector.": "vision.projector.",
    "multi_modal_projector.": "vision.projector.",
}
"""Prefixes of tensor names of a tower in files, and the prefixes in the tower's table."""

_OTHER_NAMES = {"kimi_k2": "deepseek_v3"} | {sight.text_type: sight.text for sight in VISION_FORMATS.values()}
"""Other names of families in published files, and the names of the families."""

_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "transformers_version")
"""Fields of the whole model that override the text part's fields."""


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text part, as in a config.json of its own; all fields if there are no parts."""
    text = _text_config(fields)
    name = str(text.get("model_type")) if text is not None else ""
    name = _OTHER_NAMES.get(name, name)
    if text is None or name not in FAMILIES:
        return dict(fields)
    whole = {name: fields[name] for name in _OF_THE_WHOLE if fields.get(name) is not None}
    made = text | whole | {"architectures": [FAMILIES[name].causal], "model_type": name}
    for place in ("rope_parameters", "rope_scaling"):
        rope = made.get(place)
        if isinstance(rope, dict) and "mrope_section" in rope:
            kept = {name: value for name, value in rope.items() if name not in OF_IMAGES}
            made[place] = {name: "default" if value == "mrope" else value for name, value in kept.items()}
    return made


def _text_config(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the text part; older files have them at the top level, among the whole model's fields."""
    text = fields.get("text_config")
    if isinstance(text, dict):
        return text
    sight = VISION_FORMATS.get(str(fields.get("model_type")))
    if sight is None:
        return None
    of_vision = ("vision_", "image_", "video_")
    kept = {name: value for name, value in fields.items() if not name.startswith(of_vision)}
    return kept | {"model_type": sight.text_type}


def read_vision(fields: Mapping[str, Any], where: str) -> Vision:
    """Read the vision tower of a vision-language checkpoint.

    Args:
      fields: Fields of the whole config.json.
      where: Name of the file, for messages.

    Raises:
      Refusal: The checkpoint has no vision tower, or a tower that is not supported.
    """
    sight, tower = sight_of(fields), fields.get("vision_config")
    if sight is None or not isinstance(tower, dict):
        known = ", ".join(one.architecture for one in VISION_FORMATS.values())
        raise Refusal(
            f"{where} has architecture {(fields.get('architectures') or [None])[0]!r}, but vision=True supports "
            f"{known}; use one of them, or vision=False"
        )
    given = Fields(tower, where, sight.name)
    given.take("model_type")
    vision = sight.read(given, _text_config(fields) or {}, fields)
    given.finish()
    return vision


def sight_of(fields: Mapping[str, Any]) -> VisionFormat | None:
    """Return the format of a vision-language checkpoint; None for other checkpoints and unknown formats."""
    return next((one for one in VISION_FORMATS.values() if fields.get("architectures") == [one.architecture]), None)


def part_tensors(names: Iterable[str], *, vision: bool) -> dict[str, str]:
    """Map names of tensors in a text-only checkpoint to the names of the text part's tensors in the files.

    Args:
      vision: Include the tensors of the tower.
    """
    names = list(names)
    old = any(name.startswith("visual.") for name in names)  # the text part already has text-only names
    if not old and not any(name.startswith(prefix) for name in names for prefix in _PREFIXES if "language" in prefix):
        return {name: name for name in names}
    prefixes = ({"model.": "model.", "lm_head.": "lm_head."} if old else _PREFIXES) | (_TOWERS if vision else {})
    return {
        ours + name.removeprefix(theirs): name
        for name in names
        for theirs, ours in prefixes.items()
        if name.startswith(theirs)
    }
