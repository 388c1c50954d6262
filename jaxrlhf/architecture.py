"""The shape of a decoder: what a checkpoint's `config.json` says, in one frozen dataclass."""

from dataclasses import dataclass
from typing import Literal

Head = Literal["lm", "value", "score"]


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
class ModelConfig:
    """A pre-norm decoder with grouped-query attention, rotary positions and a gated MLP.

    Attributes:
      family: Which checkpoint format the weights are read from and exported to.
      vocab_size: V, rows of the embedding.
      hidden_size: D, width of the residual stream.
      intermediate_size: F, width of the MLP.
      num_layers: L.
      num_heads: N, query heads.
      num_kv_heads: K, key-value heads; divides N.
      head_dim: H.
      qkv_bias: Whether q, k and v projections have a bias (Qwen2).
      qk_norm: Whether q and k heads are RMS-normalised (Qwen3).
      tie_embeddings: Whether the language-model head is the embedding.
      max_positions: Longest sequence the checkpoint was made for, in tokens.
    """

    family: Literal["qwen2", "qwen3", "llama"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    max_positions: int = 32_768

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"every key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions need an even one")

    def num_parameters(self, head: Head = "lm") -> int:
        """Number of weights, the embedding and the given head included."""
        width, heads, kv_heads = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = width * (heads + 2 * kv_heads) + heads * width
        attention += (heads + 2 * kv_heads) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        last = width if head != "lm" else (0 if self.tie_embeddings else width * self.vocab_size)
        return self.vocab_size * width + self.num_layers * layer + width + last
