"""Declaration and random initialization of every parameter of a model.

`declare` is the only place that defines shapes, dimension names and initializers. Random initialization, sharding
rules, and Hugging Face import and export read it. Layers are stacked on a leading `L` dimension, so that one scan
runs them.
"""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, UInt32

from jaxrlhf.batch import Params
from jaxrlhf.models.causal_lm import AnyModel, causal_lm_method
from jaxrlhf.models.config import (
    DENSE_LAYERS,
    LAYERS,
    LENDERS,
    LINEAR_LAYERS,
    Experts,
    Head,
    Indexer,
    LatentAttention,
    LinearAttention,
    ModelConfig,
    padded_rows,
)
from jaxrlhf.models.config.param import Param
from jaxrlhf.models.residual.parameters import declare_around_layers, declare_in_layers
from jaxrlhf.models.vision.parameters import declare_tower
from jaxrlhf.sharding.rules import Dim

VISION = "vision"
"""Name of the vision tower in the decoder's parameter tree."""


@causal_lm_method
def declare(config: ModelConfig, head: Head) -> dict[str, Any]:
    """Return the tree of `Param` of a model with the given head.

    A language model with tied embeddings has no `head`. A value or score head is one vector that starts at zero.
    """
    stack_of, plain = config.pattern.stack_of(), _alike(config)
    tree: dict[str, Any] = {
        "embed": _table(config),
        LAYERS: _layers(replace(plain, num_layers=stack_of.count(LAYERS))),
        "final_norm": Param((config.hidden_size,), (None,), _unit(config)),
    }
    if config.full_heads is not None:
        tree |= {stack: _apart(config, stack, stack_of.count(stack)) for stack in dict.fromkeys(stack_of)}
    tree |= declare_around_layers(config)
    if config.dense_layers:
        tree[DENSE_LAYERS] = _layers(replace(plain, num_layers=config.dense_layers, experts=None))
    if config.linear is not None:
        linear = replace(plain, num_layers=stack_of.count(LINEAR_LAYERS))
        tree[LINEAR_LAYERS] = _layers(linear) | {"attention": _linear_attention(linear, config.linear)}
    if config.mtp and head == "lm":
        tree["mtp"] = _mtp(plain)
    if config.vision is not None:
        tree[VISION] = declare_tower(config.vision)
    if head != "lm":
        tree["head"] = Param((config.hidden_size,), (None,), "zeros")
    elif not config.tie_embeddings:
        tree["head"] = _table(config)
    return tree


def _alike(config: ModelConfig) -> ModelConfig:
    """Return the configuration without the settings that make layers differ."""
    return replace(
        config,
        dense_layers=0,
        linear=None,
        linear_layers=(),
        sliding_layers=(),
        rope_layers=(),
        full_heads=None,
        borrowing_layers=0,
        sparsity=(),
    )


def _apart(config: ModelConfig, stack: str, count: int) -> dict[str, Any]:
    """Declare one stack of a model with `full_heads`; some stacks make no keys or no values of their own."""
    assert config.full_heads is not None
    layers = _layers(replace(config.of_stack(stack), num_layers=count))
    absent = {"value"} if stack == LAYERS and config.full_heads.values_are_keys else set()
    absent |= {"key", "value", "key_norm"} if stack in LENDERS else set()
    return layers | {"attention": {name: each for name, each in layers["attention"].items() if name not in absent}}


def _table(config: ModelConfig) -> Param:
    """Declare the embedding or the head, initialized so that logits start with variance 1."""
    rows = padded_rows(config.vocab_size)
    padding = rows - config.vocab_size
    return Param((rows, config.hidden_size), ("vocab", "embed"), fan_in=config.hidden_size, padding=padding)


def _unit(config: ModelConfig) -> Literal["zeros", "ones"]:
    """Return the initializer of norms, with which they scale by one."""
    return "zeros" if config.unit_offset else "ones"


def _norm(config: ModelConfig, width: int) -> Param:
    return Param((config.num_layers, width), ("layers", None), _unit(config))


def _norms(config: ModelConfig) -> dict[str, Param]:
    """Declare the norms before attention and the MLP, after them, or both."""
    kinds = {"pre": ("norm",), "post": ("output_norm",), "sandwich": ("norm", "output_norm")}[config.norms]
    return {f"{part}_{kind}": _norm(config, config.hidden_size) for part in ("attention", "mlp") for kind in kinds}


def _layers(config: ModelConfig) -> dict[str, Any]:
    """Declare all layers of a model whose layers are alike."""
    experts = config.experts
    return {
        **declare_in_layers(config),
        **_norms(config),
        "attention": _attention(config) if config.latent is None else _latent_attention(config, config.latent),
        "mlp": _mlp(config, config.intermediate_size) if experts is None else _mixture(config, experts),
    }


def _mtp(config: ModelConfig) -> dict[str, Any]:
    """Declare the layer that predicts the second next token, and the product that makes its input; see `models.mtp`."""
    width, scale = config.hidden_size, Param((config.hidden_size,), (None,), _unit(config))
    return {
        **dict.fromkeys(("embed_norm", "hidden_norm", "norm"), scale),
        "join": Param((2 * width, width), ("embed", None), fan_in=2 * width),
        "layer": _layers(replace(config, num_layers=1)),
    }


def _latent_attention(config: ModelConfig, latent: LatentAttention) -> dict[str, Param]:
    """Declare latent attention. Each matrix that makes queries, keys or values has `embed` as its input dimension."""
    layers, width, heads, rank = config.num_layers, config.hidden_size, config.num_heads, latent.rank
    key_value = config.head_dim - latent.rope_dim + latent.value_dim
    by_head = ("layers", "embed", "heads", "head_dim")
    output = (layers, heads, latent.value_dim, width)
    tree = {
        "latent": Param((layers, width, rank + latent.rope_dim), ("layers", "embed", None), fan_in=width),
        "latent_norm": _norm(config, rank),
        "key_value": Param((layers, rank, heads, key_value), by_head, fan_in=rank),
        "output": Param(output, ("layers", "heads", "head_dim", "embed"), fan_in=heads * latent.value_dim),
    }
    if latent.query_rank is not None:
        tree["query_down"] = Param((layers, width, latent.query_rank), ("layers", "embed", None), fan_in=width)
        tree["query_norm"] = _norm(config, latent.query_rank)
    into = latent.query_rank or width
    if (index := latent.indexer) is not None:
        tree |= _indexer(index, layers=layers, width=width, into=into)
    return tree | {"query": Param((layers, into, heads, config.head_dim), by_head, fan_in=into)}


def _indexer(index: Indexer, *, layers: int, width: int, into: int) -> dict[str, Param]:
    """Declare the indexer of sparse attention. No gradient passes through its choice of tokens, so it is fixed."""
    by_index: tuple[Dim, ...] = ("layers", "embed", None)
    return {
        "index_query": Param((layers, into, index.heads, index.head_dim), (*by_index, None), fan_in=into, fixed=True),
        "index_key": Param((layers, width, index.head_dim), by_index, fan_in=width, fixed=True),
        "index_weights": Param((layers, width, index.heads), by_index, fan_in=width, fixed=True),
        "index_key_norm": Param((layers, index.head_dim), ("layers", None), "ones", fixed=True),
        "index_key_bias": Param((layers, index.head_dim), ("layers", None), "zeros", fixed=True),
    }


def _linear_attention(config: ModelConfig, linear: LinearAttention) -> dict[str, Param]:
    """Declare linear attention: queries, keys and values of key heads, and a gate, rate and decay of each value head.

    Parameters that generation keeps in float32 are declared as vectors. A state space computes its rate from its
    decay. Its convolution has biases, and each of its value heads adds its values to its output with a `skip` factor.
    """
    layers, width, key_heads, value_heads = config.num_layers, config.hidden_size, linear.key_heads, linear.value_heads
    key_dim, value_dim, kernel, group = linear.key_dim, linear.value_dim, linear.kernel, value_heads // linear.key_heads
    keys, delta = linear.different_keys, linear.groups is None
    into = {"query": (keys, key_dim), "key": (keys, key_dim), "value": (key_heads, group, value_dim)}
    into |= {"gate": (key_heads, group, value_dim), "decay": (key_heads, group)}
    into |= {"rate": (key_heads, group)} if delta else {}
    heads: dict[str, tuple[Dim, ...]] = {
        name: (("heads", count), *[None] * len(rest)) for name, (count, *rest) in into.items()
    }
    tree = {
        f"linear_{name}": Param((layers, width, *shape), ("layers", "embed", *heads[name]), fan_in=width)
        for name, shape in into.items()
    }
    for name in ("query", "key", "value"):
        tree[f"convolved_{name}"] = Param((layers, *into[name], kernel), ("layers", *heads[name], None), fan_in=kernel)
        if not delta:
            tree[f"convolved_{name}_bias"] = Param((layers, *into[name]), ("layers", *heads[name]), "zeros")
    vector: tuple[Dim, ...] = ("layers", ("heads", value_heads))
    if not delta:
        tree["skip"] = Param((layers, value_heads), vector, "ones")
    normed = (layers, value_dim) if delta else (layers, value_heads, value_dim)
    output = (layers, value_heads, value_dim, width)
    return tree | {
        "decay_rate": Param((layers, value_heads), vector, "zeros"),
        "decay_bias": Param((layers, value_heads), vector, "ones"),
        "mixed_norm": Param(normed, ("layers", None) if delta else (*vector, None), "ones"),
        "output": Param(
            output, ("layers", ("heads", value_heads), "head_dim", "embed"), fan_in=value_heads * value_dim
        ),
    }


def _attention(config: ModelConfig) -> dict[str, Param]:
    layers, width, head_dim = config.num_layers, config.hidden_size, config.head_dim
    kv_heads: tuple[Dim, int] = ("kv_heads", config.num_kv_heads), config.num_kv_heads
    heads: dict[str, tuple[Dim, int]] = {"query": ("heads", config.num_heads), "key": kv_heads, "value": kv_heads}
    tree = {
        name: Param((layers, width, count, head_dim), ("layers", "embed", dim, "head_dim"), fan_in=width)
        for name, (dim, count) in heads.items()
    }
    inner = config.num_heads * head_dim
    if config.attention_gate:  # each query is followed by its gate
        gated = (layers, width, config.num_heads, 2 * head_dim)
        tree["query"] = replace(tree["query"], shape=gated)
    output = (layers, config.num_heads, head_dim, width)
    tree["output"] = Param(output, ("layers", "heads", "head_dim", "embed"), fan_in=inner)
    if config.output_bias:
        tree["output_bias"] = Param((layers, width), ("layers", None), "zeros")
    if config.attention_sinks:
        tree["sinks"] = Param((layers, config.num_heads), ("layers", "heads"), "zeros")
    if config.qkv_bias:
        for name, (dim, count) in heads.items():
            tree[f"{name}_bias"] = Param((layers, count, head_dim), ("layers", dim, "head_dim"), "zeros")
    if config.qk_norm_across_heads:
        for name, (dim, count) in heads.items():
            if name != "value":
                tree[f"{name}_norm"] = Param((layers, count, head_dim), ("layers", dim, "head_dim"), _unit(config))
    elif config.qk_norm:
        tree |= {f"{name}_norm": _norm(config, head_dim) for name in ("query", "key")}
    return tree


def _mlp(config: ModelConfig, inner: int) -> dict[str, Any]:
    layers, width = config.num_layers, config.hidden_size
    return {
        "gate": Param((layers, width, inner), ("layers", "embed", "mlp"), fan_in=width),
        "up": Param((layers, width, inner), ("layers", "embed", "mlp"), fan_in=width),
        "down": Param((layers, inner, width), ("layers", "mlp", "embed"), fan_in=inner),
    }


def _mixture(config: ModelConfig, experts: Experts) -> dict[str, Any]:
    """Declare the experts (stacked on a dimension after the layers), the shared MLP of all tokens, and the router."""
    layers, width, count, inner = config.num_layers, config.hidden_size, experts.count, experts.intermediate_size
    wide = Param((layers, count, width, inner), ("layers", "experts", "expert_embed", "mlp"), fan_in=width)
    tall = Param((layers, count, inner, width), ("layers", "experts", "mlp", "expert_embed"), fan_in=inner)
    tree: dict[str, Any] = {
        "router": Param((layers, width, count), ("layers", "embed", None), fan_in=width),
        "experts": {"gate": wide, "up": wide, "down": tall},
    }
    if experts.apart:
        tree["router_scale"] = Param((layers, width), ("layers", None), "ones")
        tree["expert_scale"] = Param((layers, count), ("layers", None), "ones")
        norms = ("experts_norm", "experts_output_norm", "shared_output_norm")
        tree |= {name: _norm(config, width) for name in norms}
    if experts.bias:
        tree["router_bias"] = Param((layers, count), ("layers", None), "zeros", fixed=True)  # it only chooses experts
    if experts.biases:
        tree["router_logit_bias"] = Param((layers, count), ("layers", None), "zeros")
        inside = Param((layers, count, inner), ("layers", "experts", "mlp"), "zeros")
        outside = Param((layers, count, width), ("layers", "experts", None), "zeros")
        tree["experts"] |= {"gate_bias": inside, "up_bias": inside, "down_bias": outside}
    if experts.shared_intermediate_size:
        tree["shared"] = _mlp(config, experts.shared_intermediate_size)
    if experts.shared_gate:
        tree["shared_gate"] = Param((layers, width, 1), ("layers", "embed", None), fan_in=width)
    return tree


@causal_lm_method
def init_params(config: ModelConfig, head: Head, key: PRNGKeyArray | UInt32[Array, "2"]) -> Params:
    """Sample float32 parameters: normal(0, 1 / fan_in) weights, norms of scale one, zero biases and scalar heads.

    Source: LeCun et al. 1998 (Efficient BackProp), section 4.6.

    The function is pure, so `jax.jit(..., out_shardings=...)` samples each device's shard in place.
    """
    return draw(declare(config, head), key)


def draw(declared: Any, key: PRNGKeyArray | UInt32[Array, "2"]) -> Any:
    """Return random float32 arrays for any tree of `Param`."""
    leaves, structure = jax.tree.flatten(declared)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [_draw(param, each) for param, each in zip(leaves, keys, strict=True)])


def _draw(param: Param, key: PRNGKeyArray | UInt32[Array, "2"]) -> Array:
    match param.init:
        case "normal":
            sampled = param.fan_in**-0.5 * jax.random.normal(key, param.unpadded, jnp.float32)
            return jnp.pad(sampled, [(0, param.padding), *[(0, 0)] * (len(param.shape) - 1)])
        case "ones":
            return jnp.ones(param.shape, jnp.float32)
        case "zeros":
            return jnp.zeros(param.shape, jnp.float32)


def param_dims(config: AnyModel, head: Head) -> dict[str, Any]:
    """Return the tree of the parameters' dimension names, a tuple in place of each array."""
    return jax.tree.map(lambda param: param.dims, declare(config, head))


def param_shapes(config: AnyModel, head: Head, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Return the tree of `jax.ShapeDtypeStruct`s, for planning memory and layouts without arrays."""
    return jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, dtype), declare(config, head))


def path_name(path: tuple[Any, ...]) -> str:
    """Return a parameter's path in the tree as text, such as `layers.attention.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
