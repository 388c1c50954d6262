"""Configuration of a decoder: the settings of a checkpoint's `config.json`, the stacks of its layers, and means."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

from jaxrlhf.config import Refusal
from jaxrlhf.models.config.parts import Experts, FullHeads, LatentAttention, LayerInputs, LinearAttention, Streams
from jaxrlhf.models.config.pattern import (
    BORROWING_LAYERS,
    DENSE_LAYERS,
    LAYERS,
    LENDERS,
    LINEAR_LAYERS,
    SLIDING_BORROWING_LAYERS,
    SLIDING_LAYERS,
    Pattern,
    find_pattern,
)
from jaxrlhf.models.config.rope import RopeScaling, YarnRope
from jaxrlhf.models.config.vision import Vision

MtpInput = Literal["output", "normed"]
"""Input of a layer that predicts the second next token, when it predicts the third: its output, or that normalized."""


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder with grouped-query attention, rotary positions and a gated MLP.

    Attributes:
      family: Checkpoint format that weights are read from and exported to.
      vocab_size: V, number of tokens of the vocabulary.
      hidden_size: D, width of the residual stream.
      intermediate_size: F, width of the MLP.
      num_layers: L, number of layers.
      num_heads: N, number of query heads.
      num_kv_heads: K, number of key-value heads; divides N.
      head_dim: H, width of a head.
      qkv_bias: True if the q, k and v projections have a bias (Qwen2).
      qk_norm: True if the q and k heads are RMS-normalized (Qwen3).
      value_norm: True if values are RMS-normalized too, without a weight (Gemma 4).
      qk_norm_across_heads: True if the norm of `qk_norm` is over all heads together (OLMo 2).
      output_bias: True if the output projection of attention has a bias (gpt-oss).
      attention_sinks: True if each query head has a sink, a score that takes a share of its softmax (gpt-oss).
      attention_gate: True if the output of a query head is multiplied by a sigmoid gate, which the query projection
        makes (Qwen3-Next).
      tie_embeddings: True if the language-model head is the embedding.
      activation: Function of the MLP's gate; `gelu_tanh` is the approximation by a hyperbolic tangent.
      norms: Position of a layer's norms: `pre` before attention and before the MLP, `post` on their outputs before
        these are added to the residual stream (OLMo 2), `sandwich` both (Gemma).
      unit_offset: True if norms scale by one plus their weight (Gemma).
      scale_embeddings: True if embeddings are multiplied by sqrt(D) (Gemma).
      query_pre_attn_scalar: Number whose square root divides attention scores; None is the head width.
      attn_logit_softcapping: Cap c of attention scores s, c tanh(s / c); None is no cap.
      final_logit_softcapping: Cap of the logits, by the same formula; None is no cap.
      embedding_multiplier: Factor of embeddings (Granite).
      residual_multiplier: Factor of the outputs of attention and the MLP in the residual stream (Granite).
      logits_scaling: Divisor of the logits (Granite).
      rope_theta: Base of the rotary frequencies.
      partial_rotary_factor: Share of each head that is rotated, from its start.
      rope_interleaved: True rotates neighboring dimensions together, False rotates halves (GLM-4).
      rope_layers: Flag of each layer, true if it rotates queries and keys. Empty: all layers rotate (SmolLM3).
      sliding_window: Number of tokens that a token sees, itself included; None is all.
      sliding_layers: Flag of each layer, true if it has the window; others see everything. Empty: all have it.
      sliding_rope_theta: Base of the rotary frequencies of layers with the window, without scaling; None uses
        `rope_theta` and `rope_scaling`.
      full_heads: Heads of the layers without the window, which then form a separate stack (Gemma 4); None has the same
        heads in all layers.
      borrowing_layers: Number of last layers that borrow keys and values. A layer with the window borrows from the last
        lending layer with it, and a layer without it from the last one without it. Requires `full_heads`.
      borrowing_intermediate_size: F of the borrowing layers; None is F of the others.
      layer_inputs: Token embeddings for each layer (Gemma 4); None is none.
      streams: Several residual streams (Gemma 3n); None is one.
      laurel_rank: Rank of a product of two narrow matrices, which is added to the residual stream next to attention
        (Gemma 3n); None is no product.
      sparsity: Share of the MLP's gates that is dropped in each layer; the largest gates are kept (Gemma 3n).
        Empty: none is dropped.
      layer_scale: True if a layer's result is multiplied by a number that is not trained (Gemma 4).
      latent: Latent attention, with queries and keys of width H; None projects keys and values.
      linear: Linear attention in some layers; None is none.
      linear_layers: Flag of each layer, true if it has linear attention.
      dense_layers: Number of first layers that have an MLP, where later layers have experts.
      max_positions: Longest sequence the checkpoint was made for, in tokens.
      experts: Mixture of experts instead of the MLP; None is a dense MLP.
      mtp: One more layer that predicts the token after the next one (multi-token prediction, MTP); it drafts tokens,
        and has a loss of its own. The value is what it reads in place of the decoder's hidden states to predict
        further tokens. None is no such layer.
      vision: Vision tower whose features replace the embeddings of image tokens; None reads text only.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    qk_norm_across_heads: bool = False
    output_bias: bool = False
    attention_sinks: bool = False
    attention_gate: bool = False
    tie_embeddings: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norms: Literal["pre", "post", "sandwich"] = "pre"
    unit_offset: bool = False
    rms_norm_eps: float = 1e-6
    scale_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    rope_layers: tuple[bool, ...] = ()
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    sliding_rope_theta: float | None = None
    full_heads: FullHeads | None = None
    borrowing_layers: int = 0
    borrowing_intermediate_size: int | None = None
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None
    laurel_rank: int | None = None
    sparsity: tuple[float, ...] = ()
    layer_scale: bool = False
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    linear_layers: tuple[bool, ...] = ()
    dense_layers: int = 0
    max_positions: int = 32_768
    experts: Experts | None = None
    mtp: MtpInput | None = None
    vision: Vision | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise Refusal(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"every key-value head serves the same number of query heads"
            )
        if self.rotary_dim % 2:
            raise Refusal(
                f"head_dim={self.head_dim} with partial_rotary_factor={self.partial_rotary_factor} rotates "
                f"{self.rotary_dim} dimensions; rotary positions need an even number"
            )
        if self.dense_layers and (self.experts is None or self.dense_layers >= self.num_layers):
            raise Refusal(
                f"dense_layers={self.dense_layers} of num_layers={self.num_layers} requires experts in the later "
                "layers; set dense_layers=0 for a model without experts"
            )
        if self.experts is not None and self.activation not in ("silu", self.experts.activation):
            raise Refusal(
                f"activation={self.activation!r} differs from experts.activation={self.experts.activation}; set the "
                "same activation"
            )
        if self.experts is not None and self.borrowing_intermediate_size is not None:
            raise Refusal(
                "borrowing_intermediate_size does not support experts, whose MLP has one size in all layers; set "
                "borrowing_intermediate_size=None"
            )
        if (self.linear is not None) != any(self.linear_layers) or (self.linear_layers and all(self.linear_layers)):
            raise Refusal(
                f"linear_layers={self.linear_layers} does not fit linear={self.linear}; expected both kinds of "
                "layers, or no linear layers and linear=None"
            )
        if self.linear is not None and (self.dense_layers or self.latent is not None or self.norms != "pre"):
            raise Refusal(
                f"linear attention does not support dense_layers={self.dense_layers}, latent={self.latent} and "
                f"norms={self.norms!r}; expected dense_layers=0, latent=None and norms='pre'"
            )
        if self.full_heads is not None:
            self._check_full_heads(self.full_heads)
        elif self.borrowing_layers:
            raise Refusal(
                f"borrowing_layers={self.borrowing_layers} requires full_heads; set full_heads or borrowing_layers=0"
            )
        if self.streams is not None and (self.layer_inputs is None or self.norms != "sandwich" or self.layer_scale):
            raise Refusal("streams requires layer_inputs, norms='sandwich' and layer_scale=False; set streams=None")
        for name in ("sliding_layers", "rope_layers", "linear_layers", "sparsity"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise Refusal(
                    f"{name} has {len(getattr(self, name))} entries, but num_layers={self.num_layers}; expected one "
                    "entry for each layer, or none"
                )

    def _check_full_heads(self, full: FullHeads) -> None:
        """Raise `Refusal` if layers with and without the window cannot form separate stacks, or cannot borrow."""
        if self.num_heads % full.kv_heads:
            raise Refusal(
                f"num_heads={self.num_heads} is not a multiple of full_heads.kv_heads={full.kv_heads}; "
                f"every key-value head serves the same number of query heads"
            )
        if self.latent is not None or self.linear is not None or self.dense_layers or self.sliding_window is None:
            raise Refusal(
                "full_heads requires sliding_window, and supports neither latent nor linear attention nor dense_layers"
            )
        own = set(self.sliding_layers[: self.num_layers - self.borrowing_layers])
        if False not in own or not set(self.sliding_layers) <= own:
            raise Refusal(
                f"borrowing_layers={self.borrowing_layers} with sliding_layers={self.sliding_layers}; expected an "
                "earlier layer without a window, and an earlier layer with a window if any layer has one"
            )

    def of_stack(self, stack: str) -> Self:
        """Return the configuration as the layers of a stack see it, with the heads, width and window of the stack."""
        if self.full_heads is None:
            return self
        borrows, slides = stack in LENDERS, LENDERS.get(stack, stack) == SLIDING_LAYERS
        own: dict[str, Any] = {} if slides else {"sliding_window": None, "sliding_rope_theta": None}
        if not slides:
            own |= {"num_kv_heads": self.full_heads.kv_heads, "head_dim": self.full_heads.head_dim}
        if borrows and self.borrowing_intermediate_size is not None:
            own["intermediate_size"] = self.borrowing_intermediate_size
        own |= {"full_heads": None, "borrowing_layers": 0, "borrowing_intermediate_size": None}
        own |= {"sliding_layers": (), "sparsity": ()}
        return replace(self, **own)

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def score_divisor(self) -> float:
        """Divisor of the products of queries and keys."""
        divisor = math.sqrt(self.query_pre_attn_scalar or self.head_dim)
        if self.latent is not None and isinstance(self.rope_scaling, YarnRope) and self.rope_scaling.mscale_all_dim:
            # In latent attention the part that is not rotated grows as well.
            return divisor / self.rope_scaling.magnitude(self.rope_scaling.mscale_all_dim) ** 2
        return divisor

    @property
    def pattern(self) -> Pattern:
        """Order of the layers, by stack."""
        return find_pattern([name for part in self._parts() for name in part])

    @property
    def sections(self) -> tuple[Pattern, ...]:
        """Patterns that run one after another: one, or layers that keep keys and values, then layers that borrow."""
        return tuple(find_pattern(part) for part in self._parts() if part)

    def _parts(self) -> tuple[list[str], list[str]]:
        """Return the stack of each layer: of layers that keep keys and values, then of layers that borrow them."""
        if self.linear is not None:
            return [LINEAR_LAYERS if linear else LAYERS for linear in self.linear_layers], []
        if self.full_heads is None:
            return [DENSE_LAYERS] * self.dense_layers + [LAYERS] * (self.num_layers - self.dense_layers), []
        first = self.num_layers - self.borrowing_layers
        own, borrowing = self.sliding_layers[:first], self.sliding_layers[first:]
        return (
            [SLIDING_LAYERS if slides else LAYERS for slides in own],
            [SLIDING_BORROWING_LAYERS if slides else BORROWING_LAYERS for slides in borrowing],
        )

    @cached_property
    def attention_layers(self) -> int:
        """Number of layers that keep keys and values."""
        return self.num_layers - sum(self.linear_layers) - self.borrowing_layers

    @cached_property
    def kinds(self) -> tuple[tuple[str, int, Self], ...]:
        """Name of each stack, number of its layers, and the configuration as its layers see it."""
        counts = Counter(self.pattern.stack_of())
        return tuple((stack, count, self.of_stack(stack)) for stack, count in counts.items())

    def mean(self, number: Callable[[Self], float], *, borrowing: bool = True) -> float:
        """Return the mean of `number` over the layers.

        Args:
          borrowing: False counts 0 for layers that borrow keys and values.
        """
        if self.full_heads is None:
            return number(self)
        kinds = [kind for kind in self.kinds if borrowing or kind[0] not in LENDERS]
        return sum(count * number(layer) for _, count, layer in kinds) / self.num_layers

    @cached_property
    def mean_head_dim(self) -> float:
        """Mean width of a head over the layers."""
        return self.mean(lambda layer: layer.head_dim)

    @cached_property
    def mean_kv_width(self) -> float:
        """Mean width of a token's keys in all heads, over the layers; values are as wide. Borrowing layers count 0."""
        return self.mean(lambda layer: layer.num_kv_heads * layer.head_dim, borrowing=False)

    @cached_property
    def mean_intermediate_size(self) -> float:
        """Mean of F, the width of the MLP, over the layers."""
        return self.mean(lambda layer: layer.intermediate_size)

    @property
    def state_bytes(self) -> int:
        """Bytes of the linear-attention states that all layers keep for a sequence of any length."""
        return 0 if self.linear is None else sum(self.linear_layers) * self.linear.state_bytes

    @property
    def cache_width(self) -> float:
        """Mean number of cache entries (scalars) per token and layer."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope_dim
        width = 2 * self.mean_kv_width
        return width if self.linear is None else width * self.attention_layers / self.num_layers

    @property
    def stream_width(self) -> int:
        """Width of a token's hidden state between two layers, over all streams."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    @property
    def routed_choices(self) -> tuple[int, int]:
        """Number of layers with experts, and number of experts per token in each of them."""
        assert self.experts is not None
        return self.num_layers - self.dense_layers, self.experts.per_token
