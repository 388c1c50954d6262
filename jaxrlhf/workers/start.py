"""The weights that a role starts from: drawn at random, of a checkpoint, or a copy of the policy's."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.architecture import Head, ModelConfig
from jaxrlhf.batch import Params
from jaxrlhf.checkpoint import TreeItem, check_pretrained, load_pretrained
from jaxrlhf.config import Config, Lora, Model, ModelReward, Pretrained
from jaxrlhf.models.adapter_files import load_adapters
from jaxrlhf.models.hf_config import read_config
from jaxrlhf.models.lora import declare_adapters
from jaxrlhf.models.own_model import AnyModel
from jaxrlhf.models.parameters import draw, init_params
from jaxrlhf.workers.remat import head_of


def initial_params(model: Model, config: AnyModel, head: Head, layout: Any, shapes: Any, *, seed: int) -> Params:
    """Parameters as the run starts with them, in the given layout and the dtypes of `shapes`."""
    dtypes = jax.tree.map(lambda shape: shape.dtype, shapes)
    if not isinstance(model, Pretrained):

        def build(seed: Any) -> Params:
            # The key is made inside, because a program over several processes takes no array of one of them.
            drawn = init_params(config, head, jax.random.key(seed))
            return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), drawn, dtypes)

        return jax.jit(build, out_shardings=layout)(np.uint32(seed))
    assert isinstance(config, ModelConfig), "a checkpoint is of the decoder"
    return load_pretrained(model.path, config, head, layout, dtype=dtypes)


def check_starts(config: Config, *, policy: Path | None) -> None:
    """Refuse checkpoints that no role could start from, before anything is loaded or compiled.

    Args:
      policy: Where the policy lies that stands in for the configuration's model.

    Raises:
      ValueError: As `check_pretrained`.
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


def saved_params(folder: Path, shapes: Any, layout: Any) -> Params:
    """The parameters that a checkpoint's item holds, in the given layout."""
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout)
    restored: list[Params] = []
    TreeItem(lambda: target, restored.append).restore(folder)
    return restored[0]


def copied(params: Params, layout: Any, shapes: Any) -> Params:
    """New buffers in the given layout and dtypes, zeros where `params` has none.

    What is trained is donated, so nothing is shared.
    """

    def copy(tree: Params) -> Params:
        zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items() if name not in tree}
        there = {name: shapes[name] for name in tree}
        return {**jax.tree.map(lambda x, shape: jnp.array(x, shape.dtype, copy=True), tree, there), **zeros}

    return jax.jit(copy, out_shardings=layout)(params)
