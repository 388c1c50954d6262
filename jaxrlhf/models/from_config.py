"""Model and tokenizer of a run, built from its settings."""

from collections.abc import Sized
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Config, FromScratch, Model, Nnx, Refusal
from jaxrlhf.data.tokenizer import SEEING, load_tokenizer
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.config import read_config, scratch_config, scratch_vision
from jaxrlhf.models.huggingface.hub import check_no_adapters_alone, resolve

_VOCABULARY_MULTIPLE = 64
"""Multiple to which from-scratch vocabularies are rounded up, so that they split over devices."""


def model_config(model: Model, tokenizer: Sized) -> AnyModel:
    """Return the model that a run trains."""
    if isinstance(model, Nnx):
        from jaxrlhf.models.nnx import NnxModel  # flax.nnx takes a second to import

        return NnxModel.of(model)
    if isinstance(model, FromScratch):
        return from_scratch(model, tokens=len(tokenizer))
    return read_config(model.path, vision=model.vision, mtp=model.mtp)


def from_scratch(model: FromScratch, *, tokens: int) -> ModelConfig:
    """Return the configuration of a new decoder for a tokenizer with `tokens` tokens."""
    rounded = -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    config = scratch_config(model, vocab_size=rounded)
    if model.vision is None:
        return config
    # Image tokens are the last tokens of the tokenizer.
    return replace(config, vision=scratch_vision(model.vision, config, first_token=tokens - len(SEEING)))


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run. The embedded tokenizer has image tokens if the model reads images."""
    vision = isinstance(config.model, FromScratch) and config.model.vision is not None
    path = tokenizer_path(config)
    if vision and path is not None:
        raise Refusal(
            f"FromScratch(vision=...) requires the embedded tokenizer, but tokenizer={path!r}; set tokenizer=None"
        )
    return load_tokenizer(path, vision=vision)


def tokenizer_path(config: Config) -> str | None:
    """Return the directory of the tokenizer; None is the embedded tokenizer."""
    path = config.tokenizer or getattr(config.model, "path", None)
    if path is None:
        return None
    directory = resolve(path)
    if config.tokenizer is None:
        check_no_adapters_alone(directory)
    return str(directory)
