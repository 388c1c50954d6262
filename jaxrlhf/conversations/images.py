"""Images in messages of an episode: parts of contents, and their places among the tokens."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxrlhf.batch import Image
from jaxrlhf.config import Refusal
from jaxrlhf.conversations.rendering import mapped, texts_in
from jaxrlhf.data.image_prompts import in_place, mark_of, referred
from jaxrlhf.data.images import MARK, ImageReader, placed
from jaxrlhf.episode import EnvironmentFailure, Message, ShownImage

_MESSAGES = "the messages of an environment"


_SPELLED = "\ue002"
"""Character in the place of a `MARK` that a text spells, in messages that are rendered again."""


class SeenTokens(NamedTuple):
    """Tokens of messages, and where their images stand among them."""

    tokens: tuple[int, ...]
    images: tuple[Image, ...]


def marked(messages: Sequence[Message]) -> tuple[list[Message], list[Hashable]]:
    """The messages as text, with a `MARK` for each image; and where the images are.

    Raises:
      EnvironmentFailure: A part is neither a text nor an image, or a text beside images spells a mark.
    """
    sources: list[Hashable] = []
    told = [as_text(message, sources) for message in messages]
    if sources and sum(str(message.get("content")).count(MARK) for message in told) != len(sources):
        raise EnvironmentFailure("wrong-type", f"beside images a text must not spell {MARK}")
    return told, sources


def written(
    told: Sequence[Message],
    sources: Sequence[Hashable],
    reader: ImageReader | None,
    write: Callable[..., tuple[int, ...]],
) -> SeenTokens:
    """Tokens of marked messages.

    Args:
      write: Function of the messages, and of `rewritten` as of `ChatFormat.prompt`, to tokens.

    Raises:
      EnvironmentFailure: An image is damaged, nobody reads images, or the chat template does not show each of them.
    """
    try:
        return shown(referred(sources, reader, place=_MESSAGES), reader, partial(write, told), place=_MESSAGES)
    except Refusal as refusal:
        raise EnvironmentFailure("wrong-type", str(refusal)) from refusal


def shown(
    images: Sequence[Image], reader: ImageReader | None, write: Callable[..., tuple[int, ...]], *, place: str
) -> SeenTokens:
    """Tokens of what has a `MARK` for each of these images, which are not in a prompt yet.

    Args:
      write: Function of `rewritten`, as of `ChatFormat.prompt`, to tokens.

    Raises:
      EnvironmentFailure: The chat template does not show each of them.
      Refusal: A text spells placeholders.
    """
    if not images:
        return SeenTokens(write(), ())
    assert reader is not None, "there are references to images"
    tokens = write(rewritten=partial(_in_place, images=images, reader=reader))
    return SeenTokens(tokens, placed(tokens, images, reader.placeholders.token, place=place))


def spelled(messages: Sequence[Message]) -> list[Message]:
    """Messages without images, whose texts may spell a `MARK`, as `shown_again` takes them."""
    if not any(MARK in text for message in messages for text in texts_in(message)):
        return [*messages]
    return [
        mapped(message, lambda text: text.replace(_SPELLED, "\ufffd").replace(MARK, _SPELLED)) for message in messages
    ]


def shown_again(
    images: Sequence[Image], reader: ImageReader | None, write: Callable[..., tuple[int, ...]]
) -> SeenTokens:
    """Tokens of a conversation from its beginning, which has these images.

    Args:
      write: Function of `rewritten`, as of `ChatFormat.prompt`, to tokens.

    Raises:
      EnvironmentFailure: The chat template does not show each image, or what was said spells placeholders.
    """

    def whole(*, rewritten: Callable[[str], str] = lambda text: text) -> tuple[int, ...]:
        return write(rewritten=lambda text: rewritten(text).replace(_SPELLED, MARK))

    try:
        return shown(images, reader, whole, place=_MESSAGES)
    except Refusal as refusal:
        raise EnvironmentFailure("wrong-type", str(refusal)) from refusal


def behind(images: Sequence[Image], tokens: int) -> tuple[Image, ...]:
    """Images of a part of a sequence in the sequence, of which so many tokens stand before it."""
    return tuple(replace(image, start=tokens + image.start) for image in images)


def with_sources(messages: Sequence[Message], images: Sequence[Image]) -> list[dict[str, Any]]:
    """Messages of a record, which have a `MARK` for each image, with parts in their places.

    Of a record without images a `MARK` is text.
    """
    if not images:
        return [dict(message) for message in messages]
    left = iter(images)
    return [{**message, "content": _parts(message["content"], left)} for message in messages]


def kept(messages: Sequence[Message]) -> list[Message]:
    """The messages with a `ShownImage` for each data URL."""
    return _with_urls(messages, lambda url: ShownImage.of(url) if isinstance(url, str) else url)


def loaded(messages: Sequence[Message]) -> list[Message]:
    """The messages with their data URLs in the places of images."""
    return _with_urls(messages, lambda url: url.load() if isinstance(url, ShownImage) else url)


def _with_urls(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    def changed(part: Any) -> Any:
        return part if part["type"] != "image_url" else {**part, "image_url": {"url": change(part["image_url"]["url"])}}

    return [
        message if isinstance(message["content"], str) else {**message, "content": [*map(changed, message["content"])]}
        for message in messages
    ]


def _parts(text: str, left: Any) -> str | list[dict[str, Any]]:
    before, *texts = text.split(MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}]
    for rest in texts:
        parts += [{"type": "image_url", "image_url": {"url": next(left).source}}, {"type": "text", "text": rest}]
    return [part for part in parts if part.get("text") != ""] if texts else text


def for_people(message: Message) -> Message:
    """A message as text, with the names of its images."""
    if not isinstance(message.get("content"), list | tuple):
        return message
    texts = [
        part["text"] if part["type"] == "text" else mark_of(part["image_url"]["url"]) for part in message["content"]
    ]
    return {**message, "content": "".join(texts)}


def as_text(message: Message, sources: list[Hashable]) -> Message:
    """A message as text, with a `MARK` for each image; where they are is put behind `sources`."""
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


def _in_place(text: str, *, images: Sequence[Image], reader: ImageReader) -> str:
    """A rendered text with what stands for images."""
    if (found := text.count(MARK)) != len(images):
        raise EnvironmentFailure(
            "wrong-type", f"the chat template writes {found} of the {len(images)} images of these messages"
        )
    return in_place(text, images=images, reader=reader)
