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
class Experts:
    """A mixture of experts in place of each layer's MLP; planned for, not run yet.

    Attributes:
      count: E, routed experts of a layer.
      per_token: Of them, how many a token goes through.
      intermediate_size: F of one expert.
      shared_intermediate_size: F of what every token goes through beside them; 0 is nothing.
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"a token goes through per_token={self.per_token} of count={self.count} experts; "
                f"per_token has to be from 1 to count"
            )


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
      experts: Mixture of experts in place of the MLP; None is a dense MLP.
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
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"every key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions need an even one")

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = (heads + 2 * kv_heads) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        return self.hidden_size * (heads + 2 * kv_heads) + heads * self.hidden_size + biases

    def mlp_parameters(self, *, experts: float | None = None) -> float:
        """Weights of one layer's MLP, or of its router, its shared part and its experts.

        Args:
          experts: How many to count; None is all.
        """
        if self.experts is None:
            return 3 * self.hidden_size * self.intermediate_size
        counted = self.experts.count if experts is None else experts
        inner = counted * self.experts.intermediate_size + self.experts.shared_intermediate_size
        return 3 * self.hidden_size * inner + self.hidden_size * self.experts.count

    def head_parameters(self, head: Head = "lm") -> int:
        """Weights that the last hidden state is read with; the embedding's where they are tied."""
        return self.hidden_size * (self.vocab_size if head == "lm" else 1)

    def num_parameters(self, head: Head = "lm") -> int:
        """Number of weights, the embedding and the given head included."""
        layer = self.attention_parameters + int(self.mlp_parameters()) + 2 * self.hidden_size
        last = 0 if head == "lm" and self.tie_embeddings else self.head_parameters(head)
        return self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size + last
