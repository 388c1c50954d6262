"""`CausalLM` of a user's own `flax.nnx` module."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Nnx, Refusal
from jaxrlhf.models.attention.kv_cache import LayerCache, Prefix
from jaxrlhf.models.attention.shared_prefix import SharedPrefix
from jaxrlhf.models.causal_lm import CausalLM
from jaxrlhf.models.config import Head
from jaxrlhf.models.decoder import DecodeOutput, HiddenStates, PrefillOutput
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.parameters import Param

DIM_NAMES = ("embed", "heads", "kv_heads", "mlp", "vocab")
"""Names of dimensions that a layout splits; `layers` is not included, because a module has no pipeline stages."""


@dataclass(frozen=True)
class NnxModel(CausalLM):
    """Model that wraps a `flax.nnx` module. Its parameters are the module's `nnx.Param`s: `{"module": {...}}`.

    All other state of the module is as `build` makes it. The module runs in `eval()` mode, without dropout.

    The `out_sharding` metadata of a parameter gives its dimension names
    (`nnx.with_partitioning(init, ("embed", "mlp"))`): names of `DIM_NAMES`, or None for a dimension that stays whole.
    Without metadata a vector stays whole, and a larger parameter is split over `fsdp` by its largest dimension;
    all tensor shards then hold and compute the same numbers.

    The module keeps no keys and values. Its cache is the token ids of each slot, and every new token runs the module
    over the whole sequence again.
    """

    build: Callable[[nnx.Rngs], nnx.Module]
    name: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    num_layers: int = 1
    num_kv_heads: int = 1

    @classmethod
    def of(cls, settings: Nnx) -> "NnxModel":
        """Build the model from settings. The module's shapes are traced, and nothing is computed.

        Raises:
          Refusal: `build` returns no module, or a module whose call and `head()` are missing or return wrong shapes.
        """
        kind = ""

        def shapes() -> tuple[Any, Any]:
            nonlocal kind
            module, token_RW = _built(settings.build, jax.random.key(0)), jnp.zeros((1, 2), jnp.int32)
            kind = type(module).__name__
            return module(token_RW, token_RW, token_RW + 1), module.head()

        hidden, table = jax.eval_shape(shapes)
        if hidden.ndim != 3 or hidden.shape[:2] != (1, 2) or table.ndim != 2 or table.shape[1] != hidden.shape[2]:
            raise Refusal(
                f"Nnx: for one row of two tokens, {kind} returns hidden states {hidden.shape} and head() returns "
                f"{table.shape}; expected (1, 2, D) and (V, D), whose product is the logits"
            )
        warnings.warn(
            f"{kind} has no key-value cache, so generation recomputes the whole sequence for every token",
            RuntimeWarning,
            stacklevel=2,
        )
        positions = 2**31 - 1 if settings.max_positions is None else settings.max_positions
        vocab, width = table.shape
        return cls(settings.build, f"{kind}, a user-defined module", vocab, width, max_positions=positions)

    def declare(self, head: Head) -> dict[str, Any]:
        tree: dict[str, Any] = {"module": dict(_declared(self.build))}
        return tree if head == "lm" else {**tree, "head": Param((self.hidden_size,), (None,), "zeros")}

    def init_params(self, head: Head, key: Any) -> Params:
        variables = _variables(_built(self.build, key)).items()
        params: Params = {"module": {path: variable.get_value().astype(jnp.float32) for path, variable in variables}}
        return params if head == "lm" else {**params, "head": jnp.zeros(self.hidden_size, jnp.float32)}

    def table(self, params: Params) -> Array:
        return self._module(params).head()

    def hidden_states(
        self,
        params: Params,
        token_RW: Array,
        position_RW: Array,
        segment_RW: Array,
        *,
        shared_prefix: SharedPrefix | None = None,
        execution: Execution = ONE_DEVICE,
    ) -> HiddenStates:
        """Run the module over packed rows."""
        assert execution.pipeline is None, "a user-defined module does not support stages"
        assert shared_prefix is None, "a user-defined module does not support shared prompts"
        hidden_RWD = self._module(params, execution.dtype)(token_RW, position_RW, segment_RW).astype(execution.dtype)
        return HiddenStates(execution.split_rows(hidden_RWD))

    def empty_cache(self, *, slots: int, capacity: int, execution: Execution = ONE_DEVICE) -> list[LayerCache]:
        """Return a cache of one layer with one head; key and value at a position are the token id there."""
        return [
            LayerCache(jnp.zeros((slots, 1, 1, capacity), jnp.int32), jnp.zeros((slots, 1, capacity, 1), jnp.int32))
        ]

    def prefill(
        self,
        params: Params,
        token_PS: Array,
        length_P: Array,
        *,
        layers: list[Params] | None = None,
        chunk_tokens: int | None = None,
        execution: Execution = ONE_DEVICE,
    ) -> PrefillOutput:
        """Run prompts whole."""
        hidden_PD = self._last(params, token_PS, length_P - 1, execution)
        token_LPSKH = token_PS[None, :, :, None, None]
        return PrefillOutput(hidden_PD, Prefix(token_LPSKH, token_LPSKH))

    def unstack_layers(self, params: Params, *, execution: Execution = ONE_DEVICE) -> list[Params]:
        return []

    def decode(
        self,
        layers: list[Params],
        params: Params,
        token_B: Array,
        position_B: Array,
        cache: list[LayerCache],
        *,
        execution: Execution = ONE_DEVICE,
    ) -> DecodeOutput:
        token_BTKH = token_B[:, None, None, None]
        [stored] = cache
        stored = stored.write(token_BTKH, token_BTKH, position_B[:, None])
        return DecodeOutput(self._last(params, stored.key_BKHS[:, 0, 0], position_B, execution), [stored])

    def _last(self, params: Params, token_BS: Array, last_B: Array, execution: Execution) -> Array:
        """Return the hidden state of the last token of each row."""
        position_BS = jnp.broadcast_to(jnp.arange(token_BS.shape[1]), token_BS.shape)
        segment_BS = (position_BS <= last_B[:, None]).astype(jnp.int32)
        hidden_BSD = self.hidden_states(params, token_BS, position_BS, segment_BS, execution=execution).hidden_RWD
        return jnp.take_along_axis(hidden_BSD, last_B[:, None, None], axis=1)[:, 0]

    def _module(self, params: Params, dtype: Any = jnp.float32) -> Any:
        """Build the module with these parameters, matrices in `dtype`. Its random initial values are never computed."""
        module = _built(self.build, jax.random.key(0))
        for path, variable in _variables(module).items():
            leaf = params["module"][path]
            variable.set_value(leaf.astype(dtype) if leaf.ndim > 1 else leaf)
        return module


def _built(build: Callable[[nnx.Rngs], nnx.Module], key: Any) -> Any:
    with nnx.use_eager_sharding(False):  # dimension names are no mesh axes; the layout maps the names to axes
        module = build(nnx.Rngs(key))
    if not isinstance(module, nnx.Module) or not callable(module) or not hasattr(module, "head"):
        raise Refusal(
            f"Nnx.build returned {type(module).__name__}; expected a flax.nnx.Module that maps tokens, positions and "
            "segments to hidden states, with a method head() that returns the output matrix"
        )
    module.eval()
    return module


def _variables(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Return the parameters of a module by path."""
    found = [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)]
    return {".".join(map(str, path)): variable for path, variable in found}


@functools.cache
def _declared(build: Callable[[nnx.Rngs], nnx.Module]) -> Mapping[str, Param]:
    """Return the shape and dimension names of each parameter by path."""
    names: dict[str, Any] = {}

    def shapes() -> dict[str, Any]:
        variables = _variables(_built(build, jax.random.key(0)))
        names.update({path: variable.get_metadata("out_sharding", None) for path, variable in variables.items()})
        return {path: variable.get_value() for path, variable in variables.items()}

    found = jax.eval_shape(shapes)
    return {path: Param(leaf.shape, _dims(path, leaf.shape, names[path])) for path, leaf in found.items()}


def _dims(path: str, shape: tuple[int, ...], names: Sequence[str | None] | None) -> tuple[str | None, ...]:
    if names is None:
        largest = max(range(len(shape)), key=shape.__getitem__) if len(shape) > 1 else None
        return tuple("embed" if dim == largest else None for dim in range(len(shape)))
    if len(names) != len(shape) or set(names) - {None, *DIM_NAMES}:
        raise Refusal(
            f"Nnx: {path} of shape {shape} has dimension names {tuple(names)}; expected one name per dimension, from "
            f"{', '.join(DIM_NAMES)} or None"
        )
    return tuple(names)
