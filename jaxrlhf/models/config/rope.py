"""Scalings of rotary frequencies."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearRope:
    """Rotary scaling that divides every frequency by the factor."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1+: long wavelengths are stretched, short wavelengths are kept.

    Source: transformers `_compute_llama3_parameters`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN scaling: frequencies go from kept at `beta_fast` turns in the original context to stretched at `beta_slow`.

    Attributes:
      attention_factor: Factor of cosines and sines; None computes it from `factor` and the two `mscale` values.
      truncate: True starts and ends the blending at whole dimensions.
      llama_4_scaling_beta: Growth rate of queries with position, see `query_growth` (Ministral 3); None is no growth.

    Source: Peng et al. 2023 (arXiv:2309.00071), section 3.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None

    def magnitude(self, scale: float = 1.0) -> float:
        """Compute the growth of queries and keys with the longer context: 0.1 scale ln(factor) + 1.

        Source: Peng et al. 2023 (arXiv:2309.00071), eq. 22.
        """
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class LongRope:
    """LongRoPE scaling: a factor for each frequency, one set for the original context and one for longer sequences.

    The right set for a token would depend on tokens after it. Only the short set is therefore used, and
    `max_positions` is the original context. The long set is only stored.

    Attributes:
      attention_factor: Factor of cosines and sines.

    Source: Ding et al. 2024 (arXiv:2402.13753); Phi-3.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True)
class ProportionalRope:
    """Rotation by only the first part of the frequencies, which are computed for the whole head; the rest are zero.

    Attributes:
      partial_rotary_factor: Share of the frequencies that rotate.
      factor: Divisor of the frequencies; None is 1.

    Source: Gemma 4, as `rope_type: proportional` in transformers.
    """

    partial_rotary_factor: float = 1.0
    factor: float | None = None


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope
