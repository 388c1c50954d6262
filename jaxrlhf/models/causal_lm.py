"""Interface of a causal language model other than the built-in decoder: training, generation, checkpoints.

A `CausalLM` is passed wherever the decoder has a `ModelConfig`. Its methods replace the decoder's functions of the
same names.
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
    """Causal language model with its own functions. Instances are frozen and hashable: programs are compiled for them.

    Parameters are nested dictionaries of arrays. With a value or score head they also have a vector `head`.
    Methods take the keyword arguments of the decoder's functions, including an `Execution`. A model refuses arguments
    that it does not support.

    Attributes:
      name: Name in messages and tables.
      vocab_size: V, number of tokens; further rows of the table are padding.
      hidden_size: D, width of the hidden states.
      max_positions: Longest supported sequence, in tokens.
      num_layers: Number of layers of the cache.
      num_kv_heads: Number of key-value heads of the cache.
      experts, linear, full_heads, vision: Always None; only the decoder has these parts.
      final_logit_softcapping: Cap c of logits l, c tanh(l / c); None is no cap.
      logits_scaling: Divisor of the logits.
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
    def declare(self, head: Head) -> dict[str, Any]:
        """Return the tree of `Param`: shapes, and the dimension names that the training and generation layouts use."""

    @abstractmethod
    def init_params(self, head: Head, key: Any) -> Params:
        """Return random float32 parameters. The function is pure, so that each device samples its own shards."""

    @abstractmethod
    def table(self, params: Params) -> Array:
        """Return the output table `[V, D]`. Logits are hidden states times its transpose."""

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
        """Return the `HiddenStates` of packed rows."""

    @abstractmethod
    def empty_cache(self, *, slots: int, capacity: int, execution: Execution = ONE_DEVICE) -> Any:
        """Return an empty cache: a list of `LayerCache`."""

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
        """Return the `PrefillOutput` of prompts."""

    @abstractmethod
    def unstack_layers(self, params: Params, *, execution: Execution = ONE_DEVICE) -> list[Params]:
        """Return the layers in the form that `decode` takes; called once before the decode loop."""

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
        """Return the `DecodeOutput` of one token of every slot."""


AnyModel = ModelConfig | CausalLM
"""Configuration of the built-in decoder, or a model with its own functions."""


def causal_lm_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a decoder function: for a `CausalLM` as `config`, call the model's method of the same name instead."""
    name, place = function.__name__, list(inspect.signature(function).parameters).index("config")

    @functools.wraps(function)
    def choose(*arguments: Any, **options: Any) -> Any:
        config = arguments[place]
        if not isinstance(config, CausalLM):
            return function(*arguments, **options)
        return getattr(config, name)(*arguments[:place], *arguments[place + 1 :], **options)

    return choose
