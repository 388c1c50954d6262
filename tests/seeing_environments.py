"""Environments and tools that show pictures."""

import hashlib

import numpy as np
import PIL.Image

from jaxrlhf.episode import Observation


def picture(*parts, size=(28, 42)):
    """Pixels that depend on some texts and numbers alone."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8))


class Shows:
    """Shows a picture at first, unless the record's own is shown, and another one after every reply."""

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
    """Ends after the reply to the second picture, whatever the record."""

    def reset(self, record, seed):
        return super().reset({"turns": 2}, seed)


class Damaged:
    """Shows what is no picture."""

    def reset(self, record, seed):
        return [{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}]

    def step(self, reply):
        return Observation(done=True)


class TooLarge(Shows):
    """Shows a picture of more tokens than an observation may have."""

    def step(self, reply):
        return picture(reply.text, size=(112, 112))


def draw(text: str):
    """Draw a picture.

    Args:
        text: Of anything.
    """
    return picture(text)


def read(text: str):
    """Read a list.

    Args:
        text: Of anything.
    """
    return [{"type": "text", "text": text}]
