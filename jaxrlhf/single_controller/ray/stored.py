"""Handles of values in Ray's object store; a value travels directly from its host to the process that loads it."""

from dataclasses import dataclass
from typing import Any

from jaxrlhf.episode import ShownImage
from jaxrlhf.single_controller.ray.failure import HostDied, HostId


@dataclass(frozen=True)
class Stored:
    """Handle of a value that one host returned, in the object store of the host's machine.

    Arguments of a call may contain handles, alone or in lists and tuples; the receiving host loads the values. A value
    lives as long as its host process and at least one handle.

    Attributes:
      rows: First dimension of all arrays of the value; None if they differ.
    """

    reference: Any
    host: HostId
    label: str
    rows: int | None = None

    def load(self) -> Any:
        """Return the value; its NumPy arrays are read-only.

        Raises:
          HostDied: The value is lost because its host ended.
        """
        import ray

        try:
            return ray.get(self.reference)
        except ray.exceptions.ObjectLostError as error:
            raise HostDied(self.host, self.label, "ended before its result was loaded") from error


def loaded(value: Any) -> Any:
    """Replace handles by their values, alone or within lists and tuples."""
    if isinstance(value, Stored):
        return value.load()
    if type(value) in (list, tuple):
        return type(value)(loaded(item) for item in value)
    return value


@dataclass(frozen=True)
class StoredImage:
    """Handle of an image of an episode, in the object store of the episode's machine."""

    reference: Any

    def __call__(self) -> str:
        """Return the image as a data URL.

        Raises:
          RuntimeError: The image is lost because its host process ended.
        """
        import ray

        try:
            return str(ray.get(self.reference))
        except ray.exceptions.ObjectLostError as error:
            raise RuntimeError(
                "an image of an episode is lost, because its host ended before the training step; start the run "
                "again to resume from the last checkpoint"
            ) from error


def register_image_handles() -> None:
    """Make Ray send images of episodes as handles between this process and others."""
    import ray

    ray.util.register_serializer(ShownImage, serializer=_handle_of, deserializer=_image_of)


def keep_images_in_store() -> None:
    """Make this process keep images of episodes in Ray's object store."""
    import ray

    ShownImage.keep = staticmethod(lambda url: StoredImage(ray.put(url)))


def _handle_of(image: ShownImage) -> tuple[str, Any]:
    return image.digest, image.load


def _image_of(handle: tuple[str, Any]) -> ShownImage:
    return ShownImage.elsewhere(*handle)
