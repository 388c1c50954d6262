"""The shape of a decoder: what a checkpoint's `config.json` says, in one frozen dataclass."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config import Refusal
from jaxrlhf.models.config.parts import Experts, LatentAttention, LinearAttention
from jaxrlhf.models.config.pattern import DENSE_LAYERS, LAYERS, LINEAR_LAYERS, Pattern, find_pattern
from jaxrlhf.models.config.rope import RopeScaling, YarnRope
from jaxrlhf.models.config.vision import Vision

Head = Literal["lm", "value", "score"]
FamilyName = Literal[
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "olmo2",
    "gemma2",
    "gemma3_text",
    "deepseek_v2",
    "deepseek_v3",
    "olmo3",
    "smollm3",
    "glm4",
    "glm4_moe",
    "ministral3",
    "mistral4",
    "granite",
    "minimax_m2",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "deepseek_v32",
]


def padded_rows(vocab_size: int) -> int:
    """Rows of an embedding or a head: zeros after the last token, up to a multiple of 64, or of 16 if it is tiny.

    They split over that many devices, and a run's checkpoint is the same whatever its layout.
    """
    multiple = 64 if vocab_size >= 512 else 16
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True)
class ModelConfig:
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
      latent: Latent attention, with queries and keys of width H; None projects keys and values.
      linear: Linear attention in some layers; None is none.
      linear_layers: Flags of those layers.
      dense_layers: Number of first layers, which have an MLP where the others have experts.
      max_positions: Longest sequence the checkpoint was made for, in tokens.
      experts: Mixture of experts in place of the MLP; None is a dense MLP.
      vision: Tower whose features stand in prompts; None reads text alone.
    """

    family: FamilyName
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
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
        if self.experts is not None and self.activation != "silu":
            raise Refusal(f"activation={self.activation!r} with experts, which compute silu; give activation='silu'")
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
        for name in ("sliding_layers", "rope_layers", "linear_layers"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise Refusal(
                    f"{name} speaks of {len(getattr(self, name))} layers, num_layers is {self.num_layers}; "
                    f"give one entry for each layer, or none"
                )

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
        return find_pattern([DENSE_LAYERS] * first + [LAYERS] * (count - first))

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.num_layers - sum(self.linear_layers)

    @property
    def state_bytes(self) -> int:
        """Bytes that all layers keep of a sequence, however long it is."""
        return 0 if self.linear is None else sum(self.linear_layers) * self.linear.state_bytes

    @property
    def cache_width(self) -> float:
        """Numbers of a token that the cache holds in each layer, on average over the layers."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope_dim
        width = 2 * self.num_kv_heads * self.head_dim
        return width if self.linear is None else width * self.attention_layers / self.num_layers

    @property
    def attention_parameters(self) -> float:
        """Weights of one layer's attention, on average over the layers."""
        if self.linear is None:
            return self._attention_parameters
        return self._all_attention_parameters / self.num_layers

    @property
    def _all_attention_parameters(self) -> int:
        """Weights of all layers' attention."""
        linear = 0 if self.linear is None else self.linear.parameters(self.hidden_size)
        return self.attention_layers * self._attention_parameters + sum(self.linear_layers) * linear

    @property
    def _attention_parameters(self) -> int:
        """Weights of attention in a layer that keeps keys and values."""
        if self.latent is not None:
            latent, width = self.latent, self.hidden_size
            key_value = self.head_dim - latent.rope_dim + latent.value_dim
            down = width * (latent.rank + latent.rope_dim) + latent.rank
            up = latent.rank * self.num_heads * key_value + self.num_heads * latent.value_dim * width
            rank = latent.query_rank
            query = width * rank + rank + rank * self.num_heads * self.head_dim if rank else 0
            if (index := latent.indexer) is not None:
                down += (width + 2) * index.head_dim + width * index.heads
                down += (rank or width) * index.heads * index.head_dim
            return down + up + (query or width * self.num_heads * self.head_dim)
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = (heads + kv_heads if self.qk_norm_across_heads else 2 * self.head_dim) * self.qk_norm
        biases = (heads + 2 * kv_heads) * self.qkv_bias
        biases += self.hidden_size * self.output_bias + self.num_heads * self.attention_sinks
        biases += self.hidden_size * heads * self.attention_gate
        return self.hidden_size * (heads + 2 * kv_heads) + heads * self.hidden_size + biases + norms

    @property
    def routed_choices(self) -> tuple[int, int]:
        """Layers with experts, and experts that a token goes through in each."""
        assert self.experts is not None
        return self.num_layers - self.dense_layers, self.experts.per_token

    @property
    def norm_parameters(self) -> int:
        """Weights of one layer's norms before and after attention and MLP."""
        return (4 if self.norms == "sandwich" else 2) * self.hidden_size

    def mlp_parameters(self, *, experts: float | None = None) -> float:
        """Weights of one layer's MLP, or of its router, its shared part and its experts.

        Args:
          experts: Number of experts to count; None is all.
        """
        if self.experts is None:
            return 3 * self.hidden_size * self.intermediate_size
        counted = self.experts.count if experts is None else experts
        inner = counted * self.experts.intermediate_size + self.experts.shared_intermediate_size
        biases = counted * (2 * self.experts.intermediate_size + self.hidden_size) * self.experts.biases
        router = (self.hidden_size + self.experts.bias + self.experts.biases) * self.experts.count
        shared = self.hidden_size * self.experts.shared_gate
        return 3 * self.hidden_size * inner + biases + router + shared

    def layer_parameters(self, *, experts: float | None = None) -> float:
        """Weights of attention and MLP, on average over the layers.

        Args:
          experts: Number of experts to count; None is all.
        """
        first, last = 3 * self.hidden_size * self.intermediate_size, self.mlp_parameters(experts=experts)
        return self.attention_parameters + last + (first - last) * self.dense_layers / self.num_layers

    def head_parameters(self, head: Head = "lm") -> int:
        """Weights of the head; those of the embedding where they are tied."""
        return self.hidden_size * (self.vocab_size if head == "lm" else 1)

    def num_parameters(self, head: Head = "lm") -> int:
        """Number of weights, the embedding and the given head included."""
        layers = self._all_attention_parameters
        layers += self.num_layers * (int(self.mlp_parameters()) + self.norm_parameters)
        layers += self.dense_layers * (3 * self.hidden_size * self.intermediate_size - int(self.mlp_parameters()))
        last = 0 if head == "lm" and self.tie_embeddings else self.head_parameters(head)
        tower = 0 if self.vision is None else self.vision.parameters
        return self.vocab_size * self.hidden_size + layers + self.hidden_size + last + tower
