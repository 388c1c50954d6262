"""Parts of a checkpoint that sees or hears: its text, as a checkpoint without towers has it, and its vision tower."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.models.config import Vision
from jaxrlhf.models.huggingface.families import FAMILIES, SIGHTS, Fields, Sight
from jaxrlhf.models.huggingface.families.rope_fields import OF_IMAGES

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}
"""Beginnings of the names of its tensors, and those in a checkpoint that is text alone."""

_TOWERS = {
    "model.visual.": "vision.",
    "visual.": "vision.",
    "model.vision_tower.": "vision.tower.",
    "vision_tower.": "vision.tower.",
    "model.multi_modal_projector.": "vision.projector.",
    "multi_modal_projector.": "vision.projector.",
}
"""Beginnings of the names of a tower's tensors, and those that its table has."""

_OTHER_NAMES = {"kimi_k2": "deepseek_v3"} | {sight.text_type: sight.text for sight in SIGHTS.values()}
"""Names that published files have for a family."""

_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "transformers_version")
"""Fields that count for the text part where the whole model says them."""


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text part, as its own config.json would have them; all of them where there are no parts."""
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
    """The fields of the text part; in older files they stand beside those of the whole."""
    text = fields.get("text_config")
    if isinstance(text, dict):
        return text
    sight = SIGHTS.get(str(fields.get("model_type")))
    if sight is None:
        return None
    of_vision = ("vision_", "image_", "video_")
    kept = {name: value for name, value in fields.items() if not name.startswith(of_vision)}
    return kept | {"model_type": sight.text_type}


def read_vision(fields: Mapping[str, Any], where: str) -> Vision:
    """The tower of a checkpoint that sees.

    Args:
      fields: Fields of the whole config.json.
      where: Name of the file, for messages.

    Raises:
      Refusal: It does not see, or its tower is not computed.
    """
    sight, tower = sight_of(fields), fields.get("vision_config")
    if sight is None or not isinstance(tower, dict):
        known = ", ".join(one.architecture for one in SIGHTS.values())
        raise Refusal(
            f"{where} has architecture {(fields.get('architectures') or [None])[0]!r}, and vision=True reads those "
            f"with a tower that is computed: {known}; give one of them, or vision=False"
        )
    given = Fields(tower, where, sight.name)
    given.take("model_type")
    vision = sight.read(given, _text_config(fields) or {}, fields)
    given.finish()
    return vision


def sight_of(fields: Mapping[str, Any]) -> Sight | None:
    """Format of a checkpoint that sees; None if it does not, or is of none of the known ones."""
    return next((one for one in SIGHTS.values() if fields.get("architectures") == [one.architecture]), None)


def part_tensors(names: Iterable[str], *, vision: bool) -> dict[str, str]:
    """Names of the tensors of the text part in their files, by those in a checkpoint that is text alone.

    Args:
      vision: Tensors of the tower as well.
    """
    names = list(names)
    old = any(name.startswith("visual.") for name in names)  # text has its own names already
    if not old and not any(name.startswith(prefix) for name in names for prefix in _PREFIXES if "language" in prefix):
        return {name: name for name in names}
    prefixes = ({"model.": "model.", "lm_head.": "lm_head."} if old else _PREFIXES) | (_TOWERS if vision else {})
    return {
        ours + name.removeprefix(theirs): name
        for name in names
        for theirs, ours in prefixes.items()
        if name.startswith(theirs)
    }
