"""Declaration of one parameter, and kinds of heads."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.sharding.rules import Dim

Head = Literal["lm", "value", "score"]


def padded_rows(vocab_size: int) -> int:
    """Return the number of rows of an embedding or a head, zero-padded to a multiple of 64, or of 16 below 512 tokens.

    The rows split over that many devices, and a run's checkpoint is the same in every layout.
    """
    multiple = 64 if vocab_size >= 512 else 16
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Param:
    """Declaration of one parameter: shape, dimension names and initializer.

    Attributes:
      shape: Full, unsharded shape.
      dims: Name of each dimension for the sharding rules. None is never split. A name with a count stays whole over
        mesh axes that do not divide the count.
      init: Initializer, used if no checkpoint has the parameter.
      fan_in: Number of inputs that one output sums over; a normal weight starts with variance 1 / fan_in.
      padding: Number of entries at the end of the first dimension that are not part of the model: always zeros.
      fixed: True if the parameter is not trained.
    """

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 1
    padding: int = 0
    fixed: bool = False

    @property
    def unpadded(self) -> tuple[int, ...]:
        """Shape without the padding."""
        return (self.shape[0] - self.padding, *self.shape[1:])

    @property
    def stacked(self) -> bool:
        """True if the first dimension counts layers."""
        return self.dims[0] == "layers"
