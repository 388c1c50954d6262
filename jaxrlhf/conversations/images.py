"""Images in messages of an episode: parts of contents, and positions among the tokens."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxrlhf.batch import Image
from jaxrlhf.config import Refusal
from jaxrlhf.conversations.rendering import mapped, texts_in
from jaxrlhf.data.image_prompts import expanded, mark_of, parts_of, referred
from jaxrlhf.data.images import MARK, ImageReader, check_pixels, placed
from jaxrlhf.episode import EnvironmentFailure, Message, ShownImage

_MESSAGES = "the messages of an environment"

_SPELLED = "\ue002"
"""Character that replaces a `MARK` spelled by a text, in messages that are rendered again."""


class SeenTokens(NamedTuple):
    """Tokens of messages, and their images with positions among the tokens."""

    tokens: tuple[int, ...]
    images: tuple[Image, ...]


def mark_images(messages: Sequence[Message]) -> tuple[list[Message], list[Hashable]]:
    """Return the messages as text with a `MARK` for each image, and the sources of the images.

    Raises:
      EnvironmentFailure: A part is neither a text nor an image, or there are images and a text spells a mark.
    """
    sources: list[Hashable] = []
    texts = [_as_text(message, sources) for message in messages]
    if sources and sum(str(message.get("content")).count(MARK) for message in texts) != len(sources):
        raise EnvironmentFailure("wrong-type", f"beside images a text must not spell {MARK}")
    return texts, sources


def tokenize_marked(
    messages: Sequence[Message],
    sources: Sequence[Hashable],
    reader: ImageReader | None,
    write: Callable[..., tuple[int, ...]],
) -> SeenTokens:
    """Return the tokens of marked messages, with their images.

    Args:
      write: Function from the messages, and `rewritten` as in `ChatFormat.prompt`, to tokens.

    Raises:
      EnvironmentFailure: An image is damaged, the images have too many pixels together, there is no reader, or the
        chat template does not show each image.
    """
    try:
        if reader is not None:
            check_pixels([url for url in map(str, sources) if url.startswith("data:")], place=_MESSAGES)
        return tokenize_with_images(
            referred(sources, reader, place=_MESSAGES), reader, partial(write, messages), place=_MESSAGES
        )
    except Refusal as refusal:
        raise EnvironmentFailure("wrong-type", str(refusal)) from refusal


def tokenize_with_images(
    images: Sequence[Image], reader: ImageReader | None, write: Callable[..., tuple[int, ...]], *, place: str
) -> SeenTokens:
    """Return the tokens of messages with a `MARK` for each of these images, and the images with their positions.

    Args:
      write: Function from `rewritten`, as in `ChatFormat.prompt`, to the tokens of the messages.

    Raises:
      EnvironmentFailure: The chat template does not show each image.
      Refusal: A text spells placeholders.
    """
    if not images:
        return SeenTokens(write(), ())
    assert reader is not None, "there are references to images"
    tokens = write(rewritten=partial(_with_placeholders, images=images, reader=reader, place=place))
    return SeenTokens(tokens, placed(tokens, images, reader.placeholders.token, place=place))


def escape_marks(messages: Sequence[Message]) -> list[Message]:
    """Prepare messages without images for `retokenize_with_images`: replace each `MARK` that their texts spell."""
    if not any(MARK in text for message in messages for text in texts_in(message)):
        return [*messages]
    return [
        mapped(message, lambda text: text.replace(_SPELLED, "\ufffd").replace(MARK, _SPELLED)) for message in messages
    ]


def retokenize_with_images(
    images: Sequence[Image], reader: ImageReader | None, write: Callable[..., tuple[int, ...]]
) -> SeenTokens:
    """Return the tokens of a whole conversation with these images, rendered again from its beginning.

    Args:
      write: Function from `rewritten`, as in `ChatFormat.prompt`, to the tokens of the conversation.

    Raises:
      EnvironmentFailure: The chat template does not show each image, or a message spells placeholders.
    """

    def whole(*, rewritten: Callable[[str], str] = lambda text: text) -> tuple[int, ...]:
        return write(rewritten=lambda text: rewritten(text).replace(_SPELLED, MARK))

    try:
        return tokenize_with_images(images, reader, whole, place=_MESSAGES)
    except Refusal as refusal:
        raise EnvironmentFailure("wrong-type", str(refusal)) from refusal


def shift_images(images: Sequence[Image], tokens: int) -> tuple[Image, ...]:
    """Shift the positions of a part's images by the number of tokens before the part."""
    return tuple(replace(image, start=tokens + image.start) for image in images)


def restore_images(messages: Sequence[Message], images: Sequence[Image]) -> list[dict[str, Any]]:
    """Return the messages of a record with an image part in the place of each `MARK`.

    In a record without images, a `MARK` is text.
    """
    if not images:
        return [dict(message) for message in messages]
    parts = ({"type": "image_url", "image_url": {"url": image.source}} for image in images)
    contents = (message["content"] for message in messages)
    split = [parts_of(content, parts) if MARK in content else content for content in contents]
    return [{**message, "content": content} for message, content in zip(messages, split, strict=True)]


def store_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a `ShownImage` in the place of each data URL."""
    return _with_urls(messages, lambda url: ShownImage.of(url) if isinstance(url, str) else url)


def load_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a data URL in the place of each `ShownImage`."""
    return _with_urls(messages, lambda url: url.load() if isinstance(url, ShownImage) else url)


def _with_urls(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    def changed(part: Any) -> Any:
        return part if part["type"] != "image_url" else {**part, "image_url": {"url": change(part["image_url"]["url"])}}

    return [
        message if isinstance(message["content"], str) else {**message, "content": [*map(changed, message["content"])]}
        for message in messages
    ]


def as_readable_text(message: Message) -> Message:
    """Return a message as text, with the names of its images."""
    if not isinstance(message.get("content"), list | tuple):
        return message
    texts = [
        part["text"] if part["type"] == "text" else mark_of(part["image_url"]["url"]) for part in message["content"]
    ]
    return {**message, "content": "".join(texts)}


def _as_text(message: Message, sources: list[Hashable]) -> Message:
    """Return a message as text with a `MARK` for each image, and append the images' sources to `sources`."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    text = ""
    for part in content:
        match part:
            case {"type": "text", "text": str(words)}:
                text += words
            case {"type": "image_url", "image_url": {"url": (str() | ShownImage()) as url}}:
                text += MARK
                sources.append(url)
            case _:
                raise EnvironmentFailure("wrong-type", f"a part of a message is {part!r:.80}, no text and no image")
    return {**message, "content": text}


def _with_placeholders(text: str, *, images: Sequence[Image], reader: ImageReader, place: str) -> str:
    """Replace the marks in a rendered text by the placeholders of images."""
    if (found := text.count(MARK)) != len(images):
        raise EnvironmentFailure(
            "wrong-type", f"the chat template writes {found} of the {len(images)} images of these messages"
        )
    return expanded(text.replace(MARK, reader.placeholders.enclosed), images, reader, place=place)
