"""Parts of a layer that only some models have: attention of another kind, and experts in place of the MLP."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config import Refusal


@dataclass(frozen=True)
class Indexer:
    """Indexer, which chooses the tokens that sparse attention sees (DeepSeek-V3.2): weights that are only kept.

    Attention to all tokens is that of a sequence of at most `top` tokens, which chooses all of them.

    Attributes:
      heads: Heads of queries.
      head_dim: Width of a query, and of the one key.
      top: Tokens that a token sees.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv:2512.02556), section 2.1.
    """

    heads: int
    head_dim: int
    top: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads are made of one short cached vector per token.

    Attributes:
      rank: Width of that vector.
      rope_dim: Width of the last part of a query or key, which is rotated; all heads share that of keys.
      value_dim: Width of a head's values.
      query_rank: Width of a vector that queries are made of; None makes them of the layer's input.
      interleaved: Neighbours are rotated together, and not halves.
      indexer: Indexer of sparse attention; None is none.

    Source: DeepSeek-AI 2024 (DeepSeek-V2, arXiv:2405.04434), section 2.1.
    """

    rank: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    interleaved: bool = True
    indexer: Indexer | None = None


@dataclass(frozen=True)
class LinearAttention:
    """Attention whose heads each keep a matrix of fixed size, and no keys and values.

    Attributes:
      key_heads: K, heads of queries and keys; a state space repeats those of its groups, to so many.
      value_heads: Heads of values; a multiple of K.
      key_dim: X, width of a query or key.
      value_dim: U, width of a value.
      kernel: Tokens that a causal convolution of queries, keys and values goes over.
      groups: Queries and keys of a state space that differ, the B and C of Mamba-2: K is a multiple, and the value
        heads of one are normed together. None is the gated delta rule.

    Source: Yang et al. 2024 (Gated Delta Networks, arXiv:2412.06464), section 3; state spaces: Dao and Gu 2024
    (Mamba-2, arXiv:2405.21060), section 7.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise Refusal(
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}; "
                f"every key head serves the same number of value heads"
            )
        if self.groups is not None and self.key_heads % self.groups:
            raise Refusal(
                f"key_heads={self.key_heads} is not a multiple of groups={self.groups}; each is repeated as often"
            )

    @property
    def different_keys(self) -> int:
        """Heads of queries and keys that differ."""
        return self.key_heads if self.groups is None else self.groups

    @property
    def channels(self) -> int:
        """Numbers of a key head and its values that the convolution goes over."""
        return 2 * self.key_dim + self.value_heads // self.key_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence keeps in one layer, in float32."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return 4 * (matrices + self.key_heads * (self.kernel - 1) * self.channels)

    def parameters(self, hidden_size: int) -> int:
        """Weights of one layer."""
        values, keys = self.value_heads * self.value_dim, self.different_keys * self.key_dim
        delta = self.groups is None
        projections = 2 * keys + 3 * values + (2 if delta else 1) * self.value_heads
        convolution = (2 * keys + values) * (self.kernel if delta else self.kernel + 1)
        heads = 2 * self.value_heads + self.value_dim if delta else 3 * self.value_heads + values
        return hidden_size * projections + convolution + heads


@dataclass(frozen=True)
class FullHeads:
    """Heads of layers without the window, where they are not those of layers with it.

    Attributes:
      kv_heads: Key-value heads; divides the query heads.
      head_dim: Width of all heads.
      values_are_keys: Values are what keys are made of: the same projection, neither scaled nor rotated.
    """

    kv_heads: int
    head_dim: int
    values_are_keys: bool = False


@dataclass(frozen=True)
class LayerInputs:
    """Embeddings of tokens for each layer, beside those that the first layer is given.

    Attributes:
      width: P, numbers of a token for one layer.
      vocab_size: Rows of their table.
    """

    width: int
    vocab_size: int


@dataclass(frozen=True)
class Streams:
    """Residual streams beside each other, A of them: layers compute with the first and correct the others."""

    count: int


@dataclass(frozen=True)
class ClampedGate:
    """A gate g and its product with u, both clamped to a limit: (u + 1) g sigmoid(alpha g).

    Source: gpt-oss (arXiv:2508.10925), section 2.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each layer's MLP, and the router that chooses them.

    Attributes:
      count: E, routed experts of a layer.
      per_token: k, experts that a token goes through.
      intermediate_size: F of one expert.
      shared_intermediate_size: F of the shared experts, which every token goes through; 0 is none.
      shared_gate: What the shared experts add is multiplied by a sigmoid of its own (Qwen).
      scores: Function of the router's logits.
      normalised: The scores of a token's experts are divided by their sum.
      scaling: Factor of the scores after that.
      bias: Scores have a bias while experts are chosen by them, and not as weights (DeepSeek-V3).
      biases: The router's logits and each expert's matrices have biases (gpt-oss).
      apart: Experts stand beside the MLP: they and it are normed apart, before and after, and the router has a scale of
        its input and one of each expert (Gemma 4).
      activation: Function of an expert's gate, or of its gate and up together.
      groups: Equal parts of the experts; a token goes through experts of its best groups alone.
      groups_per_token: Number of best groups.
      group_best: Number of best scores whose sum ranks a group.
      loss_coefficient: Coefficient of the load-balancing loss that the checkpoint was trained with.
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    bias: bool = False
    biases: bool = False
    apart: bool = False
    activation: Literal["silu", "gelu_tanh"] | ClampedGate = "silu"
    groups: int = 1
    groups_per_token: int = 1
    group_best: int = 1
    loss_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise Refusal(
                f"a token goes through per_token={self.per_token} of count={self.count} experts; "
                f"per_token has to be from 1 to count"
            )
        if self.groups < 1 or self.count % self.groups or not 1 <= self.groups_per_token <= self.groups:
            raise Refusal(
                f"groups_per_token={self.groups_per_token} of groups={self.groups} of {self.count} experts; "
                f"groups have to be equal, and at least one of them chosen"
            )
        in_group = self.count // self.groups
        if not 1 <= self.group_best <= in_group or self.groups_per_token * in_group < self.per_token:
            raise Refusal(
                f"a group has {in_group} experts; that has to be at least group_best={self.group_best}, and "
                f"groups_per_token={self.groups_per_token} groups have to hold per_token={self.per_token} experts"
            )
