"""The declaration of one parameter."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.sharding.rules import Dim


@dataclass(frozen=True)
class Param:
    """One parameter.

    Attributes:
      shape: Full, unsharded shape.
      dims: Name of each dimension for the sharding rules; None where it is never split, and a name with a count
        where it stays whole over mesh axes that do not divide the count.
      init: Initialiser, used where no checkpoint gives the parameter.
      fan_in: Inputs that one output sums over; a normal weight starts with variance 1 / fan_in.
      padding: Entries at the end of the first dimension that are no part of the model: always zeros.
      fixed: It stays as it is while others are trained.
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
