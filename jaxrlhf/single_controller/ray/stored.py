"""Handles of values in Ray's object store, which travel from there straight to whoever loads them."""

from dataclasses import dataclass
from typing import Any

from jaxrlhf.episode import ShownImage
from jaxrlhf.single_controller.ray.failure import HostDied, HostId


@dataclass(frozen=True)
class Stored:
    """Handle of a value that one host returned, in the object store of the host's machine.

    Arguments of a call may hold it, alone or in lists and tuples: the receiving host loads the value from
    where it is. It lives as long as its host process and a handle do.

    Attributes:
      rows: First dimension of all arrays of the value; None if they differ.
    """

    reference: Any
    host: HostId
    label: str
    rows: int | None = None

    def load(self) -> Any:
        """The value. Its NumPy arrays are read-only.

        Raises:
          HostDied: The value is lost with its host.
        """
        import ray

        try:
            return ray.get(self.reference)
        except ray.exceptions.ObjectLostError as error:
            raise HostDied(self.host, self.label, "ended before its result was loaded") from error


def loaded(value: Any) -> Any:
    """A value with each handle in it, alone or in lists and tuples, replaced by the handle's value."""
    if isinstance(value, Stored):
        return value.load()
    if type(value) in (list, tuple):
        return type(value)(loaded(item) for item in value)
    return value


@dataclass(frozen=True)
class StoredImage:
    """Handle of an image that an episode showed, in the object store of the machine where it did."""

    reference: Any

    def __call__(self) -> str:
        """The image as a data URL.

        Raises:
          RuntimeError: It is lost with the process of the host that it was shown on.
        """
        import ray

        try:
            return str(ray.get(self.reference))
        except ray.exceptions.ObjectLostError as error:
            raise RuntimeError(
                "the host that an episode showed an image on ended before it was trained on; start the run again, "
                "which goes on from its last checkpoint"
            ) from error


def hand_on_images() -> None:
    """Have Ray carry handles of images that episodes show, between this process and others."""
    import ray

    ray.util.register_serializer(ShownImage, serializer=_handle_of, deserializer=_image_of)


def store_images() -> None:
    """Have Ray's object store keep images that episodes show in this process."""
    import ray

    ShownImage.keep = staticmethod(lambda url: StoredImage(ray.put(url)))


def _handle_of(image: ShownImage) -> tuple[str, Any]:
    return image.digest, image.load


def _image_of(handle: tuple[str, Any]) -> ShownImage:
    return ShownImage.elsewhere(*handle)
