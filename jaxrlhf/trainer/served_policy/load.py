"""Loading of a policy into an engine for serving: from a run, an exported directory or a hub model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from jaxrlhf.checkpoint.pretrained import load_pretrained
from jaxrlhf.config import Pretrained, Refusal
from jaxrlhf.data.images import ImageReader
from jaxrlhf.data.tokenizer import TokenBytes, load_tokenizer
from jaxrlhf.engine import Engine
from jaxrlhf.models import choose_execution, param_dims, read_config
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.config import read_stop_tokens
from jaxrlhf.models.huggingface.hub import resolve
from jaxrlhf.models.parameters import path_name
from jaxrlhf.models.vision.reader import reader_of
from jaxrlhf.models.vision.rows import Pixels, no_pixels
from jaxrlhf.sharding.mesh import GENERATION_AXES, SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings
from jaxrlhf.trainer.saved_policy import find_policy
from jaxrlhf.trainer.served_policy.flags import EngineSizes


@dataclass(frozen=True)
class LoadedPolicy:
    """Loaded engine with the policy's tokenizer and stop tokens; `images` is the reader of a vision model's images."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    images: ImageReader | None = None


def load_policy(policy: str, sizes: EngineSizes, *, step: int | None = None, vision: bool = False) -> LoadedPolicy:
    """Load a policy onto all devices of this process.

    Args:
      policy: Policy as in `find_policy`.
      step: Step of a run's checkpoint; None is the newest.
      vision: True loads the vision tower too; the policy must have one.

    Raises:
      Refusal: There is no such policy, or it does not fit the devices.
    """
    saved = find_policy(policy, step)
    described = saved.description
    drafts = sizes.speculation is not None and not vision and saved.mtp
    config, tokenizer = read_config(described, vision=vision, mtp=drafts), load_tokenizer(str(resolve(described)))
    tower = config.vision
    images = None if tower is None else reader_of(tower, tokenizer, Pretrained(described, vision=True))
    mesh = mesh_of({"data": _replicas(sizes.tensor), "tensor": sizes.tensor}, jax.devices())
    layout, dtype = shardings(mesh, param_dims(config, "lm"), GENERATE), jnp.dtype(sizes.dtype)
    if saved.run is None:
        params = load_pretrained(policy, config, "lm", layout, dtype=dtype)
    else:
        params = _laid_out(saved.weights(config), layout, dtype)
    stops = tuple(dict.fromkeys((tokenizer.eos_token_id, *read_stop_tokens(described))))
    engine = _engine(config, mesh, sizes, stops, tokenizer, no_pixels if images is None else images.patches)
    engine.load(params, saved.step, donated=jax.tree.map(lambda _: True, params))
    return LoadedPolicy(engine, tokenizer, stops, images)


def _replicas(tensor: int) -> int:
    devices = len(jax.devices())
    if tensor < 1 or devices % tensor:
        raise Refusal(f"--tensor {tensor} does not divide {devices} devices; choose a divisor of {devices}")
    return devices // tensor


def _engine(
    config: ModelConfig,
    mesh: Any,
    sizes: EngineSizes,
    stops: tuple[int, ...],
    tokenizer: PreTrainedTokenizerBase,
    pixels: Pixels,
) -> Engine:
    context = min(4096, config.max_positions) if sizes.context_tokens is None else sizes.context_tokens
    response = max(1, context // 4) if sizes.response_tokens is None else sizes.response_tokens
    if context > config.max_positions:
        raise Refusal(f"--context {context} exceeds the model's {config.max_positions} positions; lower --context")
    if response >= context:
        raise Refusal(
            f"--max-tokens {response} leaves no tokens for a prompt in --context {context}; lower --max-tokens"
        )
    return Engine(
        config,
        mesh,
        slots=sizes.slots,
        max_prompt_tokens=context - response,
        max_response_tokens=response,
        stop_tokens=stops,
        decode_tokens_per_dispatch=8,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
        execution=choose_execution(config, jnp.dtype(sizes.dtype), mesh, **GENERATION_AXES, decodes=True, cache="auto"),
        decode=TokenBytes(tokenizer).text,
        pixels=pixels,
        speculation=sizes.speculation,
    )


def _laid_out(arrays: Iterator[tuple[str, jax.Array]], layout: Any, dtype: Any) -> Any:
    """Place the weights on devices in a layout, with one weight at a time on the host; return their tree."""
    places = {path_name(path): sharding for path, sharding in jax.tree.leaves_with_path(layout)}
    there = {name: jax.device_put(array.astype(dtype), places[name]) for name, array in arrays}
    return jax.tree.map_with_path(lambda path, _: there[path_name(path)], layout)
