"""Reader of a run's images: the image processor of the model, and the placeholder text of images in prompts."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Config, FromScratch, Pretrained, Refusal, Tower
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.images import ImageReader, Placeholders
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import Vision
from jaxrlhf.models.huggingface.hub import resolve


def image_reader(config: Config, model: AnyModel, tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """Return the reader of a run's images; None if the model reads only text."""
    vision = model.vision
    if vision is None:
        return None
    return reader_of(vision, tokenizer, config.model.vision if isinstance(config.model, FromScratch) else config.model)


def reader_of(vision: Vision, tokenizer: PreTrainedTokenizerBase, model: Any) -> ImageReader:
    """Return the reader of images for a tower; raise as `processor_of` and `placeholders_of` do."""
    return ImageReader(processor_of(model), placeholders_of(vision, tokenizer), vision.patch_size, vision.merge)


def processor_of(model: Any) -> Any:
    """Load the image processor of a checkpoint, or make one for the settings of a tower.

    The processor uses PIL and NumPy, so that pixels are the same on every host.

    Raises:
      Refusal: The checkpoint has no image processor.
    """
    if isinstance(model, Tower):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        area = (model.patch_size * model.merge) ** 2
        return Qwen2VLImageProcessorPil(
            patch_size=model.patch_size,
            merge_size=model.merge,
            min_pixels=area,
            max_pixels=area * model.most_features,
        )
    from transformers import AutoImageProcessor

    assert isinstance(model, Pretrained), "a user-defined model reads no images"
    try:
        return AutoImageProcessor.from_pretrained(resolve(model.path), backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise Refusal(
            f"no image processor could be loaded from {model.path!r} ({reason_of(error)}); use a checkpoint with "
            "preprocessor_config.json, and install jaxrlhf[vision]"
        ) from error


def placeholders_of(vision: Vision, tokenizer: PreTrainedTokenizerBase) -> Placeholders:
    """Return the placeholder text of images in prompts, expanded as the checkpoint's own processor does.

    Raises:
      Refusal: The tokenizer has no placeholder token.
    """
    ids = (vision.image_token, vision.start_token, vision.end_token)
    texts = [None if token is None else tokenizer.convert_ids_to_tokens(token) for token in ids]
    if texts[0] is None:
        raise Refusal(f"the tokenizer has no image token {vision.image_token}; use the tokenizer of the model")
    image, start, end = (str(text or "") for text in texts)
    if vision.family == "gemma3":  # its templates write only the token that begins an image
        return Placeholders(
            start, start, lambda features: f"\n\n{start}{image * features}{end}\n\n", vision.image_token
        )
    return Placeholders(image, f"{start}{image}{end}", lambda features: image * features, vision.image_token)
