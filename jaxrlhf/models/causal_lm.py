"""The protocol of a model that is not the decoder here, to be trained, generated with and checkpointed.

Such a model has a `CausalLM` where the decoder has a `ModelConfig`; its methods take the place of the
decoder's functions of the same names.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from jaxrlhf.batch import Array, Params
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution


class CausalLM(ABC):
    """A causal language model with functions of its own; frozen and hashable, as programs are compiled for it.

    Parameters are nested dictionaries of arrays; with a value or score head they have a vector `head`
    as well. Keyword arguments are those of the decoder's functions, an `Execution` among them: a model refuses what
    it cannot do.

    Attributes:
      name: Words for messages and tables.
      vocab_size: V, rows of the table.
      hidden_size: D, width of the hidden states.
      max_positions: Longest sequence that it computes, in tokens.
      num_layers: Number of layers of its cache.
      num_kv_heads: Number of heads of its cache.
      experts, linear, full_heads, vision: Always None: what only the decoder has.
      final_logit_softcapping: Cap c, by which logits l become c tanh(l / c); None leaves them.
      logits_scaling: Number that logits are divided by.
    """

    name: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    num_layers: int
    num_kv_heads: int
    experts: ClassVar[None] = None
    linear: ClassVar[None] = None
    full_heads: ClassVar[None] = None
    vision: ClassVar[None] = None
    final_logit_softcapping: ClassVar[float | None] = None
    logits_scaling: ClassVar[float] = 1.0

    @abstractmethod
    def num_parameters(self, head: Head = "lm") -> int:
        """Number of weights, the given head included."""

    @abstractmethod
    def declare(self, head: Head) -> dict[str, Any]:
        """The tree of `Param`: shapes, and the dimension names that both layouts go by."""

    @abstractmethod
    def init_params(self, head: Head, key: Any) -> Params:
        """Random float32 parameters. Pure, so that each device draws its own shards."""

    @abstractmethod
    def table(self, params: Params) -> Array:
        """`[V, D]`: logits are hidden states times its transpose."""

    @abstractmethod
    def hidden_states(
        self,
        params: Params,
        token_RW: Array,
        position_RW: Array,
        segment_RW: Array,
        *,
        shared_prefix: Any = None,
        execution: Execution = ONE_DEVICE,
    ) -> Any:
        """`HiddenStates` of packed rows."""

    @abstractmethod
    def empty_cache(self, *, slots: int, capacity: int, execution: Execution = ONE_DEVICE) -> Any:
        """A list of `LayerCache`."""

    @abstractmethod
    def prefill(
        self,
        params: Params,
        token_PS: Array,
        length_P: Array,
        *,
        layers: list[Params] | None = None,
        chunk_tokens: int | None = None,
        execution: Execution = ONE_DEVICE,
    ) -> Any:
        """`PrefillOutput` of prompts."""

    @abstractmethod
    def unstack_layers(self, params: Params, *, execution: Execution = ONE_DEVICE) -> list[Params]:
        """Layers that `decode` takes, prepared once before its loop."""

    @abstractmethod
    def decode(
        self,
        layers: list[Params],
        params: Params,
        token_B: Array,
        position_B: Array,
        cache: Any,
        *,
        execution: Execution = ONE_DEVICE,
    ) -> Any:
        """`DecodeOutput` of one token of every slot."""


AnyModel = ModelConfig | CausalLM
"""The decoder's shape, or a model with functions of its own."""


def causal_lm_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of the decoder: a `CausalLM` as its argument `config` has its own method called instead."""
    name, place = function.__name__, list(inspect.signature(function).parameters).index("config")

    @functools.wraps(function)
    def choose(*arguments: Any, **options: Any) -> Any:
        config = arguments[place]
        if not isinstance(config, CausalLM):
            return function(*arguments, **options)
        return getattr(config, name)(*arguments[:place], *arguments[place + 1 :], **options)

    return choose
