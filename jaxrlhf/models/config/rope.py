"""Scalings of rotary frequencies."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearRope:
    """Rotary scaling that divides every frequency by the factor."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1+: long wavelengths stretched, short ones kept.

    Source: transformers `_compute_llama3_parameters`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN: frequencies between `beta_fast` and `beta_slow` turns of the original context go from kept to stretched.

    Attributes:
      attention_factor: Factor of cosines and sines; None follows from the factor and the two scales.
      truncate: Blending starts and ends at whole dimensions.
      llama_4_scaling_beta: Growth of a query with its position, as `query_growth` has it; None is none (Ministral 3).

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
        """Growth of queries and keys with the longer context: 0.1 scale ln(factor) + 1.

        Source: Peng et al. 2023 (arXiv:2309.00071), eq. 22.
        """
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: a factor for each frequency, one set for sequences up to the original context, one for longer ones.

    The set that holds for a token would depend on tokens after it, so only the short one is computed and
    `max_positions` is the original context; the other is carried along.

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
    """Rotation of the first part of all frequencies, which are those of the whole head; the others do not turn.

    Attributes:
      partial_rotary_factor: Share of the frequencies that turn.
      factor: Number that frequencies are divided by; None is 1.

    Source: Gemma 4, as `rope_type: proportional` in transformers.
    """

    partial_rotary_factor: float = 1.0
    factor: float | None = None


RopeScaling = LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope
