"""Shape of a vision tower, and settings for its features in the decoder."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxrlhf.config import Refusal


class Sections(NamedTuple):
    """Sections of a decoder head's rotated pairs: a pair is rotated by a token's time, row or column.

    Attributes:
      pairs: Number of pairs of each of the three parts: time, row, column.
      interleaved: True if rows and columns take every third of the first pairs; else the pairs of a part are adjacent.

    Source: Wang et al. 2024 (Qwen2-VL, arXiv:2409.12191), section 2.1; Qwen3-VL interleaves them.
    """

    pairs: tuple[int, int, int]
    interleaved: bool = False

    def part_of(self) -> list[int]:
        """Return the part that rotates each pair: 0 is time, 1 the row, 2 the column."""
        if not self.interleaved:
            return [part for part, count in enumerate(self.pairs) for _ in range(count)]
        return [
            pair % 3 if pair % 3 and pair < 3 * self.pairs[pair % 3] else 0  # rows and columns of the first pairs
            for pair in range(sum(self.pairs))
        ]


@dataclass(frozen=True)
class Vision:
    """Shape of a vision transformer over image patches, whose features replace image tokens of a decoder.

    Attributes:
      family: Checkpoint format of tower and decoder together.
      image_token: Id of the placeholder token, one for each feature.
      hidden_size: Width of a patch's hidden state.
      intermediate_size: Width of the MLP.
      num_heads: Number of heads of bidirectional attention.
      patch_size: Side of a patch, in pixels.
      frames: Number of frames of a patch; a still image is its own second frame.
      merge: Side of the square of patches that becomes one feature, in patches.
      out_size: Width of a feature, equal to the decoder's hidden size.
      norm: Kind of norm: root mean square (`rms`), or mean and variance with a bias (`layer`).
      eps: Number added under the roots of norms.
      gated: True if the MLP has a gate.
      activation: Function of the MLP; `gelu_tanh` is the approximation by a hyperbolic tangent.
      patch_bias: True if the patch embedding has a bias.
      positions: Number of rows of a table of learned positions, a square that is stretched over each image; 0 is none.
      rotates: True if queries and keys are rotated, half of each head by the patch's row and half by its column.
      window: Side of the square that a patch sees in most layers, in features; None is the whole image.
      full_layers: Indices of layers that see the whole image despite `window`.
      deepstack: Indices of tower layers whose features are added after the decoder's first layers, one after another.
      merger: Kind of the map from a square of patches to a feature: an MLP of all patches, or a projection of their
        mean.
      sections: Sections of the decoder's rotated pairs, for positions in three parts; None has one position.
      both_ways: True if tokens of one image see each other in the decoder in both directions (Gemma 3).
      start_token, end_token, video_token: Other token ids of the checkpoint; None if it has none.
    """

    family: str
    image_token: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    out_size: int
    frames: int = 1
    merge: int = 2
    norm: Literal["rms", "layer"] = "layer"
    eps: float = 1e-6
    gated: bool = False
    activation: Literal["silu", "gelu_tanh", "gelu"] = "gelu_tanh"
    patch_bias: bool = True
    positions: int = 0
    rotates: bool = True
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()
    merger: Literal["mlp", "mean"] = "mlp"
    sections: Sections | None = None
    both_ways: bool = False
    start_token: int | None = None
    end_token: int | None = None
    video_token: int | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.rotates and self.head_dim % 4):
            raise Refusal(
                f"vision tower with hidden_size={self.hidden_size} and num_heads={self.num_heads}; num_heads must "
                "divide hidden_size, and with rotary positions the width of a head must be a multiple of 4"
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Number of values of a patch: three colors of its pixels in all frames."""
        return 3 * self.frames * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of all patches of a square, concatenated."""
        return self.merge**2 * self.hidden_size
