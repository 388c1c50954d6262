"""The shape of a decoder: what a checkpoint's `config.json` says, and in which stacks its layers lie."""

import math
from dataclasses import dataclass, replace
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

Head = Literal["lm", "value", "score"]


def padded_rows(vocab_size: int) -> int:
    """Rows of an embedding or a head: zeros after the last token, up to a multiple of 64, or of 16 if it is tiny.

    They split over that many devices, and a run's checkpoint is the same whatever its layout.
    """
    multiple = 64 if vocab_size >= 512 else 16
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class DecoderShape:
    """A decoder with grouped-query attention, rotary positions and a gated MLP.

    Attributes:
      family: Checkpoint format that weights are read from and exported to.
      vocab_size: V, rows of the embedding.
      hidden_size: D, width of the residual stream.
      intermediate_size: F, width of the MLP.
      num_layers: L.
      num_heads: N, query heads.
      num_kv_heads: K, key-value heads; divides N.
      head_dim: H.
      qkv_bias: The q, k and v projections have a bias (Qwen2).
      qk_norm: The q and k heads are RMS-normalised (Qwen3).
      value_norm: So are values, without a weight (Gemma 4).
      qk_norm_across_heads: One such norm goes over all heads together (OLMo 2).
      output_bias: The output projection of attention has a bias (gpt-oss).
      attention_sinks: Each query head has a score that takes a share of its softmax (gpt-oss).
      attention_gate: What a query head mixes is multiplied by a sigmoid, which its query projection makes (Qwen3-Next).
      tie_embeddings: The language-model head is the embedding.
      activation: Function of the MLP's gate; `gelu_tanh` is the approximation by a hyperbolic tangent.
      norms: Place of a layer's norms: `pre` before attention and before the MLP, `post` on what they
        add to the residual stream (OLMo 2), `sandwich` both (Gemma).
      unit_offset: Norms scale by one plus their weight (Gemma).
      scale_embeddings: Embeddings are multiplied by sqrt(D) (Gemma).
      query_pre_attn_scalar: Number whose square root divides scores; None is the head width.
      attn_logit_softcapping: Cap c, by which scores s become c tanh(s / c).
      final_logit_softcapping: Cap of logits in the same way.
      embedding_multiplier: Factor of embeddings (Granite).
      residual_multiplier: Factor of what attention and the MLP add to the residual stream (Granite).
      logits_scaling: Number that logits are divided by (Granite).
      rope_theta: Base of the rotary frequencies.
      partial_rotary_factor: First part of each head that is rotated.
      rope_interleaved: Neighbours are rotated together, and not halves (GLM-4).
      rope_layers: Flags of the layers that rotate queries and keys; the others do not. Empty: all do (SmolLM3).
      sliding_window: Number of tokens that a token sees, itself included; None is all.
      sliding_layers: Flags of the layers that have the window; the others see everything. Empty: all have it.
      sliding_rope_theta: Base of the rotary frequencies in those layers, which are not scaled; None is `rope_theta`.
      full_heads: Heads of the layers without the window, which then lie in a stack of their own (Gemma 4); None has the
        same heads in all layers.
      borrowing_layers: Number of last layers, which attend to the keys and values of the last layer before them that
        has the window, or has none, as they do. They go with `full_heads`.
      borrowing_intermediate_size: F of those layers; None is F of the others.
      layer_inputs: Embeddings of tokens for each layer (Gemma 4); None is none.
      streams: Several residual streams (Gemma 3n); None is one.
      laurel_rank: Width between two matrices, whose product is added to the residual stream beside attention
        (Gemma 3n); None has none.
      sparsity: Share of the MLP's gates that is left out in each layer, those that are not the largest (Gemma 3n).
        Empty: none is.
      layer_scale: What a layer gives is multiplied by a number of its own, which is not trained (Gemma 4).
      latent: Latent attention, with queries and keys of width H; None projects keys and values.
      linear: Linear attention in some layers; None is none.
      linear_layers: Flags of those layers.
      dense_layers: Number of first layers, which have an MLP where the others have experts.
      max_positions: Longest sequence the checkpoint was made for, in tokens.
      experts: Mixture of experts in place of the MLP; None is a dense MLP.
      vision: Tower whose features stand in prompts; None reads text alone.
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
                f"dense_layers={self.dense_layers} of num_layers={self.num_layers} come before layers with experts; "
                f"a model without experts has dense_layers=0"
            )
        if self.experts is not None and self.activation not in ("silu", self.experts.activation):
            raise Refusal(
                f"activation={self.activation!r} with experts, which compute {self.experts.activation}; give the same"
            )
        if self.experts is not None and self.borrowing_intermediate_size is not None:
            raise Refusal("borrowing_intermediate_size with experts, whose MLP is the same in all layers; leave it out")
        if (self.linear is not None) != any(self.linear_layers) or (self.linear_layers and all(self.linear_layers)):
            raise Refusal(
                f"linear_layers={self.linear_layers} with linear={self.linear}; some layers have linear attention and "
                f"others have not, or no layer has it and linear is None"
            )
        if self.linear is not None and (self.dense_layers or self.latent is not None or self.norms != "pre"):
            raise Refusal(
                f"linear attention with dense_layers={self.dense_layers}, latent={self.latent}, "
                f"norms={self.norms!r}; layers of both kinds have the same MLP, norms before it, and keys and values"
            )
        if self.full_heads is not None:
            self._check_full_heads(self.full_heads)
        elif self.borrowing_layers:
            raise Refusal(f"borrowing_layers={self.borrowing_layers} without full_heads, with which they go")
        if self.streams is not None and (self.layer_inputs is None or self.norms != "sandwich" or self.layer_scale):
            raise Refusal("streams go with layer_inputs, norms='sandwich' and no layer_scale; leave streams out")
        for name in ("sliding_layers", "rope_layers", "linear_layers", "sparsity"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise Refusal(
                    f"{name} speaks of {len(getattr(self, name))} layers, num_layers is {self.num_layers}; "
                    f"give one entry for each layer, or none"
                )

    def _check_full_heads(self, full: FullHeads) -> None:
        """Raise `Refusal` if layers with the window and without cannot lie apart, or have nothing to borrow."""
        if self.num_heads % full.kv_heads:
            raise Refusal(
                f"num_heads={self.num_heads} is not a multiple of full_heads.kv_heads={full.kv_heads}; "
                f"every key-value head serves the same number of query heads"
            )
        if self.latent is not None or self.linear is not None or self.dense_layers or self.sliding_window is None:
            raise Refusal("full_heads beside a window, and not beside latent or linear attention or dense_layers")
        own = set(self.sliding_layers[: self.num_layers - self.borrowing_layers])
        if False not in own or not set(self.sliding_layers) <= own:
            raise Refusal(
                f"borrowing_layers={self.borrowing_layers} with sliding_layers={self.sliding_layers}; before them have "
                f"to be a layer without the window, and one with it where others have it"
            )

    def of_stack(self, stack: str) -> Self:
        """The model as the layers of a stack see it: where stacks differ in heads, width or window, its own."""
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
        """Dimensions of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def score_divisor(self) -> float:
        """Number that products of queries and keys are divided by."""
        divisor = math.sqrt(self.query_pre_attn_scalar or self.head_dim)
        if self.latent is not None and isinstance(self.rope_scaling, YarnRope) and self.rope_scaling.mscale_all_dim:
            # Here the part that is not rotated grows as well.
            return divisor / self.rope_scaling.magnitude(self.rope_scaling.mscale_all_dim) ** 2
        return divisor

    @property
    def pattern(self) -> Pattern:
        """The order of the layers, by their stacks."""
        first, count = self.dense_layers, self.num_layers
        if self.linear is not None:
            return find_pattern([LINEAR_LAYERS if linear else LAYERS for linear in self.linear_layers])
        if self.full_heads is not None:
            return find_pattern([name for part in self._apart() for name in part])
        return find_pattern([DENSE_LAYERS] * first + [LAYERS] * (count - first))

    @property
    def sections(self) -> tuple[Pattern, ...]:
        """The pattern, or one of the layers that keep keys and values and one of those that borrow them."""
        return tuple(map(find_pattern, self._apart())) if self.borrowing_layers else (self.pattern,)

    def _apart(self) -> list[list[str]]:
        """Stacks of layers that are told apart by their windows: of those that keep keys and values, and the others."""
        first = self.num_layers - self.borrowing_layers
        own = [SLIDING_LAYERS if slides else LAYERS for slides in self.sliding_layers[:first]]
        borrowing = [SLIDING_BORROWING_LAYERS if slides else BORROWING_LAYERS for slides in self.sliding_layers[first:]]
        return [own, borrowing]
