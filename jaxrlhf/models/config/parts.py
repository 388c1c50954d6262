"""Parts of a layer that only some models have: other kinds of attention, and experts instead of the MLP."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config import Refusal


@dataclass(frozen=True)
class Indexer:
    """Indexer of sparse attention (DeepSeek-V3.2), which chooses the tokens to attend to. Its weights are only stored.

    The decoder attends to all tokens. This is exact for sequences of at most `top` tokens, because all are chosen.

    Attributes:
      heads: Number of query heads.
      head_dim: Width of a query, and of the single key.
      top: Number of tokens that a token sees.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv:2512.02556), section 2.1.
    """

    heads: int
    head_dim: int
    top: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values of all heads are made from one short cached vector per token.

    Attributes:
      rank: Width of the cached vector.
      rope_dim: Width of the rotated last part of a query or key; all heads share the rotated part of keys.
      value_dim: Width of a head's values.
      query_rank: Width of an intermediate vector that queries are made from; None makes queries from the layer's input.
      interleaved: True rotates neighboring dimensions together, False rotates halves.
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
    """Linear attention: each head keeps a state matrix of fixed size instead of keys and values.

    Attributes:
      key_heads: K, number of query and key heads. A state space repeats the queries and keys of its groups K / groups
        times.
      value_heads: Number of value heads; a multiple of K.
      key_dim: X, width of a query or key.
      value_dim: U, width of a value.
      kernel: Number of tokens that the causal convolution of queries, keys and values covers.
      groups: Number of different queries and keys of a state space (B and C of Mamba-2); K is a multiple of it. The
        value heads of a group are normalized together. None is the gated delta rule.

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
                f"key_heads={self.key_heads} is not a multiple of groups={self.groups}; every group serves the same "
                "number of key heads"
            )

    @property
    def different_keys(self) -> int:
        """Number of query and key heads that differ."""
        return self.key_heads if self.groups is None else self.groups

    @property
    def channels(self) -> int:
        """Number of convolution channels of a key head: its query, its key and its values."""
        return 2 * self.key_dim + self.value_heads // self.key_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in one layer, all counted as float32."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return 4 * (matrices + self.key_heads * (self.kernel - 1) * self.channels)


@dataclass(frozen=True)
class FullHeads:
    """Heads of layers without the window, if they differ from the heads of layers with the window.

    Attributes:
      kv_heads: Number of key-value heads; divides the number of query heads.
      head_dim: Width of all heads.
      values_are_keys: True if values come from the key projection, without the keys' norm and rotation.
    """

    kv_heads: int
    head_dim: int
    values_are_keys: bool = False


@dataclass(frozen=True)
class LayerInputs:
    """Token embeddings for each layer, in addition to the embeddings that the first layer gets.

    Attributes:
      width: P, width of a token's embedding for one layer.
      vocab_size: Number of rows of the embedding table of layer inputs.
    """

    width: int
    vocab_size: int


@dataclass(frozen=True)
class Streams:
    """Parallel residual streams (AltUp), A = `count`: layers compute with the first and correct the others."""

    count: int


@dataclass(frozen=True)
class ClampedGate:
    """Gated activation of a gate g and an up value u, both clamped to a limit: (u + 1) g sigmoid(alpha g).

    Source: gpt-oss (arXiv:2508.10925), section 2.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """Mixture of experts instead of each layer's MLP, and the router that chooses experts.

    Attributes:
      count: E, number of routed experts of a layer.
      per_token: k, number of experts per token.
      intermediate_size: F of one expert.
      shared_intermediate_size: F of the shared experts, which compute every token; 0 is none.
      shared_gate: True multiplies the output of the shared experts by a sigmoid gate (Qwen).
      scores: Function of the router's logits.
      normalised: True divides the scores of a token's experts by their sum.
      scaling: Factor of the scores after normalization.
      bias: True adds a bias to the scores when experts are chosen, but not to the mixing weights (DeepSeek-V3).
      biases: True if the router's logits and each expert's matrices have biases (gpt-oss).
      apart: True if experts run next to the MLP. Experts and MLP then have separate norms, before and after, and the
        router has a scale of its input and a scale of each expert (Gemma 4).
      activation: Function of an expert's gate, or of its gate and up together.
      groups: Number of equal groups of experts; a token only uses experts of its best groups.
      groups_per_token: Number of best groups.
      group_best: Number of best scores in a group whose sum ranks the group.
      loss_coefficient: Coefficient of the load-balancing loss in the checkpoint's training.
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
                f"per_token={self.per_token} is not in the range of the count={self.count} experts; expected "
                "per_token from 1 to count"
            )
        if self.groups < 1 or self.count % self.groups or not 1 <= self.groups_per_token <= self.groups:
            raise Refusal(
                f"groups_per_token={self.groups_per_token} of groups={self.groups} with count={self.count} experts; "
                "groups must divide count, and groups_per_token must be from 1 to groups"
            )
        in_group = self.count // self.groups
        if not 1 <= self.group_best <= in_group or self.groups_per_token * in_group < self.per_token:
            raise Refusal(
                f"a group has {in_group} experts; expected at least group_best={self.group_best}, and at least "
                f"per_token={self.per_token} experts in groups_per_token={self.groups_per_token} groups"
            )
