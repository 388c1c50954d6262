"""Prompts with images: marks in texts, and message parts as chat templates take them."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import repeat
from typing import Any

from jaxrlhf.batch import Image
from jaxrlhf.config import Refusal
from jaxrlhf.data.images import MARK, ImageReader, name_of
from jaxrlhf.data.records import Messages, texts_of


def marked(prompt: str | Messages, images: int, *, place: str) -> str | Messages:
    """Return the prompt with a `MARK` for each image; if it has none, they are put before the first user's text.

    Raises:
      Refusal: The prompt has marks, but not as many as images.
    """
    found = sum(text.count(MARK) for text in texts_of(prompt))
    if found == images:
        return prompt
    if found:
        raise Refusal(f"{place}: the prompt has {found} times {MARK} for {images} images; write it once for each image")
    if isinstance(prompt, str):
        return MARK * images + prompt
    first = next((n for n, message in enumerate(prompt) if message["role"] == "user"), 0)
    changed = prompt[first] | {"content": MARK * images + prompt[first]["content"]}
    return [*prompt[:first], changed, *prompt[first + 1 :]]


def referred(sources: Sequence[Hashable], reader: ImageReader | None, *, place: str) -> tuple[Image, ...]:
    """Return references to the images of a record, without positions in a prompt yet.

    Raises:
      Refusal: An image is damaged, or there is no reader of images.
    """
    if sources and reader is None:
        raise Refusal(f"{place}: there are images, and the model reads only text; add a vision tower (vision=...)")
    return tuple(reader.refer(source, place=place) for source in sources) if reader else ()


def expanded(
    prompt: str, images: Sequence[Image], reader: ImageReader | None, *, place: str, named: bool = False
) -> str:
    """Return a rendered prompt with one placeholder for each feature of its images.

    Args:
      named: True writes the names of the images instead, for people.

    Raises:
      Refusal: The prompt has more or fewer placeholders than images.
    """
    if reader is None or not images:
        return prompt
    texts = prompt.split(reader.placeholders.mark)
    if len(texts) != len(images) + 1:
        raise Refusal(
            f"{place}: the rendered prompt has {len(texts) - 1} times {reader.placeholders.mark!r} for {len(images)} "
            "images; a chat template has to write it once for each, and the text must not spell it"
        )
    features = (mark_of(image.source) if named else reader.placeholders.expanded(image.tokens) for image in images)
    return texts[0] + "".join(part + text for part, text in zip(features, texts[1:], strict=True))


def mark_of(source: Hashable) -> str:
    """Return the text that stands for an image in texts for people."""
    return f"{MARK[:-1]} {name_of(source)}>"


def in_parts(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with lists of texts and images as contents, as chat templates of vision models take them."""
    image = repeat({"type": "image"})
    return [message | {"content": parts_of(message["content"], image)} for message in messages]


def parts_of(text: str, images: Iterator[Any]) -> list[Any]:
    """Return the parts of a content: texts, and the next of the image parts in the place of each `MARK`."""
    parts: list[Any] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [next(images)] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts
