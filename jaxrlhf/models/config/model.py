"""Configuration of a decoder: its shape, and counts of its parameters and cache entries."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from jaxrlhf.models.config.parts import FullHeads
from jaxrlhf.models.config.pattern import LAYERS, LENDERS
from jaxrlhf.models.config.shape import DecoderShape, Head


@dataclass(frozen=True)
class ModelConfig(DecoderShape):
    """Configuration of a decoder with grouped-query attention, rotary positions and a gated MLP.

    Fields: see `DecoderShape`.
    """

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
    def attention_parameters(self) -> float:
        """Mean number of weights of one layer's attention."""
        if self.linear is None and self.full_heads is None:
            return self._attention_parameters
        return self._all_attention_parameters / self.num_layers

    @cached_property
    def _all_attention_parameters(self) -> int:
        """Number of weights of all layers' attention."""
        if self.full_heads is not None:
            each = [(count, self._attention_parameters_of(stack, self.full_heads)) for stack, count, _ in self.kinds]
            return sum(count * weights for count, weights in each)
        linear = 0 if self.linear is None else self.linear.parameters(self.hidden_size)
        return self.attention_layers * self._attention_parameters + sum(self.linear_layers) * linear

    def _attention_parameters_of(self, stack: str, full: FullHeads) -> int:
        """Return the number of attention weights of a layer of one stack, in a model with `full_heads`."""
        layer = self.of_stack(stack)
        projection = self.hidden_size * layer.num_kv_heads * layer.head_dim
        left_out = projection * (stack == LAYERS and full.values_are_keys)
        left_out += (2 * projection + layer.head_dim * self.qk_norm) * (stack in LENDERS)
        return layer._attention_parameters - left_out

    @cached_property
    def _attention_parameters(self) -> int:
        """Number of attention weights of a layer that keeps keys and values."""
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
        """Number of layers with experts, and number of experts per token in each of them."""
        assert self.experts is not None
        return self.num_layers - self.dense_layers, self.experts.per_token

    @property
    def norm_parameters(self) -> int:
        """Number of weights of one layer's norms before and after attention and MLP."""
        return (4 if self.norms == "sandwich" else 2) * self.hidden_size

    def mlp_parameters(self, *, experts: float | None = None) -> float:
        """Return the number of weights of one layer's MLP, or of its router, shared part and `experts` experts.

        Args:
          experts: Number of experts to count; None is all.
        """
        if self.experts is None:
            return 3 * self.hidden_size * self.mean_intermediate_size
        counted = self.experts.count if experts is None else experts
        inner = counted * self.experts.intermediate_size + self.experts.shared_intermediate_size
        biases = counted * (2 * self.experts.intermediate_size + self.hidden_size) * self.experts.biases
        router = (self.hidden_size + self.experts.bias + self.experts.biases) * self.experts.count
        shared = self.hidden_size * self.experts.shared_gate
        shared += (4 * self.hidden_size + self.experts.count) * self.experts.apart
        return 3 * self.hidden_size * inner + biases + router + shared

    def layer_parameters(self, *, experts: float | None = None) -> float:
        """Return the mean number of weights of a layer: attention, MLP, own inputs, narrow products and streams.

        Args:
          experts: See `mlp_parameters`.
        """
        first, last = 3 * self.hidden_size * self.intermediate_size, self.mlp_parameters(experts=experts)
        own = 0 if self.layer_inputs is None else 2 * self.hidden_size * self.layer_inputs.width
        own += 2 * self.hidden_size * (self.laurel_rank or 0)
        if self.streams is not None:
            own += self.streams.count * (self.hidden_size + self.streams.count**2 + self.streams.count)
        return self.attention_parameters + last + own + (first - last) * self.dense_layers / self.num_layers

    @property
    def _stream_parameters(self) -> int:
        """Number of weights of streams, and of narrow products next to attention."""
        width, weights = self.hidden_size, 0
        if self.laurel_rank is not None:
            weights += self.num_layers * width * (2 * self.laurel_rank + 1)
        if self.streams is not None:
            count = self.streams.count
            weights += self.num_layers * ((count + 2) * width + count**3 + count**2) + 2 * (count - 1) * width**2
        return weights

    @property
    def stream_width(self) -> int:
        """Width of a token's hidden state between two layers, over all streams."""
        return self.hidden_size * (1 if self.streams is None else self.streams.count)

    @property
    def input_parameters(self) -> int:
        """Number of weights that make and use the layers' own inputs."""
        if (inputs := self.layer_inputs) is None:
            return 0
        made = self.num_layers * inputs.width * (inputs.vocab_size + self.hidden_size) + inputs.width
        return made + self.num_layers * (2 * inputs.width + 1) * self.hidden_size

    def head_parameters(self, head: Head = "lm") -> int:
        """Return the number of weights of the head, which may be tied to the embedding."""
        return self.hidden_size * (self.vocab_size if head == "lm" else 1)

    def num_parameters(self, head: Head = "lm") -> int:
        """Return the number of weights, including the embedding and the given head."""
        layers = self._all_attention_parameters
        layers += round(self.num_layers * self.mlp_parameters()) + self.num_layers * self.norm_parameters
        layers += self.input_parameters + self.num_layers * self.layer_scale + self._stream_parameters
        layers += self.dense_layers * (3 * self.hidden_size * self.intermediate_size - int(self.mlp_parameters()))
        last = 0 if head == "lm" and self.tie_embeddings else self.head_parameters(head)
        tower = 0 if self.vision is None else self.vision.parameters
        return self.vocab_size * self.hidden_size + layers + self.hidden_size + last + tower
