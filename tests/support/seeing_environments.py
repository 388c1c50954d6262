"""Environments and tools that show pictures."""

import base64
import hashlib
import io

import numpy as np
import PIL.Image
import PIL.PngImagePlugin

from jaxrlhf.episode import Observation


def picture(*parts, size=(28, 42)):
    """Return a picture that depends only on the arguments."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8))


class Shows:
    """Environment that opens with a picture, unless the record has one, and shows another picture after every reply."""

    def reset(self, record, seed):
        self._turns, self._heard = record["turns"], [seed]
        if record.get("own"):
            return None
        said = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": "Look."}]
        return [{"role": "user", "content": said}]

    def step(self, reply):
        self._heard.append(reply.text)
        if len(self._heard) > self._turns:
            return Observation(done=True, reward=1.0)
        size = (14, 28) if len(self._heard) % 2 else (42, 28)
        shown = [{"type": "text", "text": "Now:"}, {"type": "image", "image": picture(self._heard, size=size)}]
        return Observation([{"role": "user", "content": shown}])


class ShowsOne(Shows):
    """Environment that ends after the reply to the second picture."""

    def reset(self, record, seed):
        return super().reset({"turns": 2}, seed)


PADDING = 100_000
"""Number of bytes of a picture file that are not part of the picture."""


class ShowsHeavy(ShowsOne):
    """Environment that shows pictures in large files."""

    def reset(self, record, seed):
        return self._heavy(super().reset(record, seed))

    def step(self, reply):
        seen = super().step(reply)
        return seen if seen.done else Observation(self._heavy(seen.messages))

    def _heavy(self, messages):
        for part in (part for part in messages[0]["content"] if part["type"] == "image"):
            stream, padding = io.BytesIO(), PIL.PngImagePlugin.PngInfo()
            padding.add_text("padding", "x" * PADDING)
            part["image"].save(stream, "PNG", pnginfo=padding)
            part["image"] = stream.getvalue()
        return messages


def pictures(prompt, response, answer, record):
    """Reward function: mean color of the episode's pictures."""
    parts = [part for message in record["episode"]["messages"] for part in message["content"]]
    urls = [part["image_url"]["url"] for part in parts if isinstance(part, dict) and part["type"] == "image_url"]
    assert len(urls) == 2, urls
    encoded = [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]
    return float(np.mean([np.mean(PIL.Image.open(io.BytesIO(one))) for one in encoded])) / 255


class Damaged:
    """Environment that shows bytes that are not a picture."""

    def reset(self, record, seed):
        return [{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}]

    def step(self, reply):
        return Observation(done=True)


class TooLarge(Shows):
    """Environment that shows a picture of more tokens than an observation may have."""

    def step(self, reply):
        return picture(reply.text, size=(112, 112))


def draw(text: str):
    """Draw a picture.

    Args:
        text: Words of the caller's.
    """
    return picture(text)


def read(text: str):
    """Read a list.

    Args:
        text: Words of the caller's.
    """
    return [{"type": "text", "text": text}]


async def asks(session, record):
    """Show two pictures one after another, then a third one from the beginning."""
    from openai import AsyncOpenAI

    def shown(*parts):
        written = io.BytesIO()
        picture(session.seed, *parts).save(written, "PNG")
        url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
        said = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Look."}]
        return {"role": "user", "content": said}

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:

        async def answer(*messages):
            asked = await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            return {"role": "assistant", "content": asked.choices[0].message.content}

        first = shown("first")
        said = await answer(first)
        await answer(first, said, shown("second"))
        await answer(shown("third"))
    return 1.0
