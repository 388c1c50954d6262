"""Conversion of `config.json` to `ModelConfig` and back.

A field that changes what the model computes is either understood or refused; no field is ignored on the assumption
that it has its default.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrlhf.config import FromScratch, Refusal, Tower
from jaxrlhf.config.refusal import read_object
from jaxrlhf.models.config import Experts, Head, ModelConfig, Sections, Vision
from jaxrlhf.models.huggingface.families import FAMILIES, VISION_FORMATS, Family, Fields, read_rope, write_rope
from jaxrlhf.models.huggingface.families.family import MtpFormat
from jaxrlhf.models.huggingface.families.fields import Link, written
from jaxrlhf.models.huggingface.hub import check_no_adapters_alone, resolve
from jaxrlhf.models.huggingface.text_part import read_vision, sight_of, text_fields

AGAIN = "download or export it again"

# Hugging Face's names of the gate's activation, and ours.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_LINKS = (
    Link("num_attention_heads", "num_heads"),
    Link("vocab_size", "vocab_size"),
    Link("hidden_size", "hidden_size"),
    Link("intermediate_size", "intermediate_size"),
    Link("num_hidden_layers", "num_layers"),
    Link("num_key_value_heads", "num_kv_heads"),
    Link("tie_word_embeddings", "tie_embeddings", False, bool),
    Link("rms_norm_eps", "rms_norm_eps", 1e-6, float),
)
"""Fields of all families."""


def read_fields(path: str | Path, *, whole: bool = False) -> dict[str, Any]:
    """Read the fields of the checkpoint's config.json; of a multimodal checkpoint, the fields of its text part.

    Args:
      whole: Return the fields of the whole model instead of its text part.

    Raises:
      Refusal: The file is missing or is not a JSON object.
    """
    file = resolve(path) / "config.json"
    if not file.is_file():
        check_no_adapters_alone(file.parent)
        raise Refusal(f"{file.parent} has no config.json; expected a checkpoint directory")
    fields = read_object(file, AGAIN)
    return fields if whole else text_fields(fields)


def sees(path: str | Path) -> bool:
    """Return whether the checkpoint is a vision-language model in one of the formats `VISION_FORMATS`."""
    return sight_of(read_fields(path, whole=True)) is not None


def read_stop_tokens(path: str | Path) -> list[int]:
    """Read the end-of-sequence ids from the checkpoint's generation_config.json; empty if the file names none.

    Without that file the ids are read from config.json, as transformers and vLLM do.

    Raises:
      Refusal: The file is missing or is not a JSON object.
    """
    file = resolve(path) / "generation_config.json"
    if file.is_file():
        return token_ids(read_object(file, AGAIN).get("eos_token_id"), file)
    where = file.with_name("config.json")
    whole, text = (token_ids(read_fields(path, whole=whole).get("eos_token_id"), where) for whole in (True, False))
    return whole or text


def token_ids(given: Any, file: Path) -> list[int]:
    """Return the ids of a field that holds one, several or none.

    Raises:
      Refusal: The field holds another value.
    """
    found = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(one) is not int for one in found):
        raise Refusal(f"{file} has eos_token_id={given!r:.80}; expected a token id, a list of token ids, or null")
    return found


def read_family(path: str | Path) -> tuple[Family, Head]:
    """Return the checkpoint's family, and the head that it was saved with: `lm` or `score`.

    Raises:
      Refusal: The architecture is unknown.
    """
    fields = read_fields(path)
    given = fields.get("architectures") or [None]
    for family in FAMILIES.values():
        if given == [family.causal]:
            return family, "lm"
        if given == [family.classifier] or given == [family.step_classifier]:
            return family, "score"
    known = ", ".join(name for family in FAMILIES.values() for name in (family.causal, family.classifier))
    raise Refusal(f"{path}/config.json has architecture {given[0]!r}; supported are {known}")


def labels_steps(path: str | Path) -> bool:
    """Return whether the checkpoint's head labels tokens as right or wrong.

    Raises:
      Refusal: The number of labels is not two.
    """
    fields = read_fields(path)
    if fields.get("architectures") not in [[family.step_classifier] for family in FAMILIES.values()]:
        return False
    labels = fields.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # transformers omits these defaults
    if len(labels) != 2:
        raise Refusal(
            f"{path}/config.json has {len(labels)} token labels; a process reward model has two, the second for "
            "right steps: choose another checkpoint"
        )
    return True


def read_config(path: str | Path, *, vision: bool = False, mtp: bool = False) -> ModelConfig:
    """Read the shape of the checkpoint's decoder.

    Args:
      vision: Read the shape of its vision tower as well, which the checkpoint must have. Otherwise a vision-language
        checkpoint is read as its text part.
      mtp: Include the layer that predicts the second next token, which the checkpoint must have.

    Raises:
      Refusal: The architecture is unknown, a field is missing or unknown, or a field has a value that this decoder
        does not compute.
    """
    family, _ = read_family(path)
    fields = Fields(read_fields(path), f"{path}/config.json", family.name)
    try:
        config = _read_decoder(family, fields)
    except TypeError as error:  # from arithmetic on null, or on a text in place of a number
        raise fields.unreadable(error) from error
    if mtp:
        config = replace(config, mtp=_one_mtp(path, family, vision=vision).reads)
    if not vision:
        return config
    return replace(config, vision=read_vision(read_fields(path, whole=True), f"{path}/config.json"))


def _one_mtp(path: str | Path, family: Family, *, vision: bool) -> MtpFormat:
    """Return the format of the layer that predicts the second next token; refuse files without one, or with several."""
    count = 0 if family.mtp is None else read_fields(path).get(family.mtp.config_field) or 1
    if family.mtp is None or count != 1 or vision:
        what = "a vision tower" if vision else f"{count} layers that predict further tokens"
        raise Refusal(
            f"mtp=True loads one layer that predicts the second next token, of a text model, but {path} is a "
            f"{family.name} checkpoint with {what}; set mtp=False"
        )
    return family.mtp


def _read_decoder(family: Family, fields: Fields) -> ModelConfig:
    """Build the shape from the fields; a field that nothing reads is refused."""
    family_fields = family.read(fields)
    if "activation" not in family_fields:
        fields.only("hidden_act", *_ACTIVATIONS)
    shared = fields.linked(_LINKS)
    for theirs, ours, _, kind in _LINKS:
        size = (shared | family_fields)[ours]
        if kind is None and size is not None and (type(size) is not int or size < 1):
            raise fields.error(f"{theirs}={size!r}", "expected a positive whole number")
    shared |= {
        "family": family.name,
        "head_dim": fields.take("head_dim") or shared["hidden_size"] // shared["num_heads"],
        "activation": _ACTIVATIONS[fields.take("hidden_act") or "silu"],
        **({} if "rope_theta" in family_fields else read_rope(fields)),
    }
    fields.finish()
    return ModelConfig(**shared | family_fields)


def head_fields(config: ModelConfig, head: Head) -> dict[str, Any]:
    """Return the fields of a config.json that a model's head decides."""
    if config.vision is not None:
        return {"architectures": [VISION_FORMATS[config.vision.family].architecture]}
    family = FAMILIES[config.family]
    if head == "lm":
        return {"architectures": [family.causal]}
    return {"architectures": [family.classifier], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def write_fields(config: ModelConfig, head: Head, *, dtype: str) -> dict[str, Any]:
    """Return the fields of a config.json from which transformers builds the same model.

    Raises:
      Refusal: The family's config.json is always a copy of the source's.
    """
    family, sight = FAMILIES[config.family], None if config.vision is None else VISION_FORMATS[config.vision.family]
    if family.write is None or (sight is not None and sight.write is None):
        raise Refusal(
            f"config.json of a {family.name} model can only be copied; set source to the checkpoint that the model "
            "came from"
        )
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    fields = {
        **head_fields(config, head),
        "model_type": family.name,
        **written(config, _LINKS),
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "hidden_act": activations[config.activation],
        "dtype": dtype,
        # Null, or readers would take the ids of the family's first model, which the tokenizer may not have.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **write_rope(config),
        **family.write(config),
    }
    if fields["rope_scaling"] is None:  # a field of older versions; newer versions warn about it
        del fields["rope_scaling"]
    return fields if sight is None else sight.fields(config, fields)


def scratch_config(settings: FromScratch, *, vocab_size: int) -> ModelConfig:
    """Return a decoder of the configured size, with tied embeddings: Qwen2-shaped, or Qwen3-MoE-shaped with experts."""
    experts = None
    if settings.experts:
        experts = Experts(settings.experts, settings.experts_per_token, settings.intermediate_size)
    return ModelConfig(
        family="qwen3_moe" if experts else "qwen2",
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        rope_theta=settings.rope_theta,
        qkv_bias=experts is None,
        qk_norm=experts is not None,
        tie_embeddings=True,
        experts=experts,
    )


def scratch_vision(settings: Tower, config: ModelConfig, *, first_token: int) -> Vision:
    """Return a tower of the configured size, shaped like Qwen2.5-VL's; its window covers any whole image.

    Args:
      config: Decoder that the features are for.
      first_token: Id of the token that begins an image. The next three ids are the tokens for the end of an image,
        its features, and videos.
    """
    rows = config.rotary_dim // 8
    return Vision(
        family="qwen2_5_vl",
        image_token=first_token + 2,
        start_token=first_token,
        end_token=first_token + 1,
        video_token=first_token + 3,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        patch_size=settings.patch_size,
        out_size=config.hidden_size,
        frames=2,
        merge=settings.merge,
        norm="rms",
        gated=True,
        activation="silu",
        patch_bias=False,
        window=settings.most_features,
        full_layers=tuple(range(settings.num_layers)),
        sections=Sections((config.rotary_dim // 2 - 2 * rows, rows, rows)),
    )
