"""Settings of low-rank adapters (LoRA)."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from jaxrlhf.config.settings import Bound, Finite, Positive, Settings, each

Quantization = Literal["int8", "nf4"]
AdaptedPart = Literal["decoder", "tower", "both"]


@dataclass(frozen=True)
class Lora(Settings):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): weights are frozen, adapters next to them are trained.

        y = x W + scale * (x A) B,   scale = alpha / rank

    A is initialized at random and B at zero, so training starts from the unchanged model. Weights are kept in the
    compute dtype, without gradient or moments; adapters are float32 and need about ten times the learning rate.

    Class attributes:
      MATRICES: Names of the matrices that may have an adapter.

    Attributes:
      rank: Rank r: number of columns of A and of rows of B.
      targets: Matrices of every layer that get an adapter.
      part: Part of a vision-language model that gets adapters: the decoder, the vision tower, or both. Adapters of the
        tower learn at `vision_learning_rate`, on those `targets` that the tower has.
      rslora: True uses scale = alpha / sqrt(rank), which keeps its size as the rank grows (Kalajdzievski 2023,
        arXiv:2312.03732).
      quantize: Format of the frozen matrices of all layers: 8 bits (`int8`), or the 4 bits of QLoRA (`nf4`; Dettmers et
        al. 2023, arXiv:2305.14314). None keeps the compute dtype.
      start: Directory with adapters in the format of `peft` to start from, with this rank, scale and targets.
    """

    MATRICES: ClassVar[tuple[str, ...]] = ("query", "key", "value", "output", "gate", "up", "down")

    rank: Positive[int] = 16
    alpha: Finite[Positive[float]] = 32.0
    targets: Annotated[tuple[str, ...], each(Bound(MATRICES.__contains__, f"one of {', '.join(MATRICES)}"))] = MATRICES
    part: AdaptedPart = "decoder"
    rslora: bool = False
    quantize: Quantization | None = None
    start: str | None = None

    @property
    def scale(self) -> float:
        """Factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
