"""The weights that a role starts from: drawn at random, of a checkpoint, or a copy of the policy's."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.batch import Params
from jaxrlhf.checkpoint import TreeItem, check_pretrained, load_pretrained
from jaxrlhf.config import Config, Lora, Model, ModelReward, Pretrained
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.config import read_config
from jaxrlhf.models.huggingface.peft import load_adapters
from jaxrlhf.models.lora.lora import declare_adapters
from jaxrlhf.models.lora.quantized import Quantized, quantize
from jaxrlhf.models.parameters import draw, init_params, path_name
from jaxrlhf.workers.remat import head_of
from jaxrlhf.workers.weights import layout_in


def initial_params(model: Model, config: AnyModel, head: Head, target: Any, *, seed: int) -> Params:
    """Parameters as the run starts with them, in the shapes and shardings of `target`."""
    if not isinstance(model, Pretrained):

        def build(seed: Any) -> Params:
            # The key is made inside, because a program over several processes takes no array of one of them.
            return jax.tree.map(_as, init_params(config, head, jax.random.key(seed)), target)

        return jax.jit(build, out_shardings=layout_in(target))(np.uint32(seed))
    assert isinstance(config, ModelConfig), "a checkpoint is of the decoder"
    floats = jax.tree.map(lambda x: x.scale if isinstance(x, Quantized) else x, target, is_leaf=_is_quantized)
    dtypes = jax.tree.map(lambda x: x.dtype, floats)
    wanted = {path_name(path): node for path, node in jax.tree.leaves_with_path(target, is_leaf=_is_quantized)}

    def keep(name: str, array: jax.Array) -> Any:
        return _in_place(array, wanted[name])

    return load_pretrained(model.path, config, head, layout_in(floats), dtype=dtypes, keep=keep)


def check_starts(config: Config, *, policy: Path | None) -> None:
    """Refuse checkpoints that no role could start from, before anything is loaded or compiled.

    Args:
      policy: Where the policy lies that stands in for the configuration's model.

    Raises:
      Refusal: As `check_pretrained`.
    """
    wanted: list[tuple[str, Head]] = []
    for role in config.algorithm.roles:
        own = getattr(config.algorithm, f"{role}_model", None)
        model = config.model if own is None and policy is None else own
        if isinstance(model, Pretrained):
            wanted.append((model.path, head_of(role) if own is not None else "lm"))
    wanted += [(part.path, "score") for part in config.rewards.parts if isinstance(part, ModelReward)]
    for path, head in dict.fromkeys(wanted):
        check_pretrained(path, read_config(path), head)


def initial_adapters(config: AnyModel, head: Head, lora: Lora, layout: Any, *, seed: int) -> Params:
    """Float32 adapters as the run starts with them, in the given layout."""
    if lora.start is not None:
        assert isinstance(config, ModelConfig), "adapters are of the decoder"
        return load_adapters(lora.start, config, head, lora, layout)
    declared = declare_adapters(config, head, lora)
    build = jax.jit(lambda seed: draw(declared, jax.random.fold_in(jax.random.key(seed), 1)), out_shardings=layout)
    return build(np.uint32(seed))


def saved_params(folder: Path, target: Any) -> Params:
    """The parameters that a checkpoint's item holds, in the shapes and shardings of `target`."""
    restored: list[Params] = []
    TreeItem(lambda: target, restored.append).restore(folder)
    return restored[0]


def copied(params: Params, target: Any) -> Params:
    """New buffers in the shapes and shardings of `target`, zeros where `params` has none.

    What is trained is donated, so nothing is shared.
    """

    def copy(tree: Params) -> Params:
        zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in target.items() if name not in tree}
        there = {name: target[name] for name in tree}
        return {**jax.tree.map(_as, tree, there), **zeros}

    return jax.jit(copy, out_shardings=layout_in(target))(params)


def quantized_each(params: Params, target: Any) -> Params:
    """The parameters, with those quantised that `target` has so, one after another."""
    return jax.tree.map(_in_place, params, target, is_leaf=_is_quantized)


def _in_place(leaf: Any, wanted: Any) -> Any:
    """The leaf as it is wanted; one that is quantised is deleted, so that both exist for one leaf at a time."""
    if not isinstance(wanted, Quantized) or isinstance(leaf, Quantized):
        return leaf
    made = jax.block_until_ready(jax.jit(partial(_as, wanted=wanted), out_shardings=layout_in(wanted))(leaf))
    leaf.delete()
    return made


def _as(leaf: jax.Array, wanted: Any) -> Any:
    """A copy in another dtype, or quantised: there a layer of each stage at a time, which takes some room."""
    if not isinstance(wanted, Quantized):
        return jnp.array(leaf, wanted.dtype, copy=True)
    layers = wanted.scale.sharding.shard_shape(wanted.scale.shape)[0]
    staged = leaf.astype(wanted.scale.dtype).reshape(-1, layers, *leaf.shape[1:])
    made = jax.lax.map(partial(quantize, kind=wanted.kind), jnp.moveaxis(staged, 1, 0))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), made)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)
