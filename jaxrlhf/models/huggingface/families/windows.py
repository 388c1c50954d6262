"""Kinds of a checkpoint's layers, from `layer_types` or from older fields."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.fields import Fields

SLIDING = {"full_attention": False, "sliding_attention": True}
LINEAR = {"full_attention": False, "linear_attention": True}


def read_layer_types(
    given: Fields, *, every: int | None = None, kinds: Mapping[str, bool] = SLIDING
) -> tuple[bool, ...]:
    """Read the flags of the layers that have a window (or are of the second of two kinds); empty if none are known.

    Args:
      every: Distance between layers without the flag, if the file has no `layer_types`; None returns no flags then.
      kinds: Names of kinds, and the flag of each.

    Raises:
      Refusal: A layer is of another kind, or the number of kinds is not the number of layers.
    """
    found, count = given.take("layer_types"), given.need("num_hidden_layers")
    if found is None:
        return () if every is None else tuple((index + 1) % every != 0 for index in range(count))
    if unread := set(found) - set(kinds):
        raise given.error(f"layer_types {sorted(unread)}", f"supported are {sorted(kinds)}")
    if len(found) != count:
        raise given.error(f"{len(found)} layer_types", f"num_hidden_layers is {count}")
    return tuple(kinds[kind] for kind in found)


def read_optional_window(given: Fields) -> dict[str, Any]:
    """Read a window that `use_sliding_window` switches on, by default in the layers from `max_window_layers` on."""
    used, window = given.take("use_sliding_window", False), given.take("sliding_window", 4096)
    first, layers = given.take("max_window_layers", 28), read_layer_types(given)
    if not used:
        if any(layers):
            raise given.error("layer_types with 'sliding_attention'", "use_sliding_window is not true")
        return {}
    if window is None:
        raise given.error("use_sliding_window=True", "sliding_window is missing")
    layers = layers or tuple(index >= first for index in range(given.need("num_hidden_layers")))
    return {"sliding_window": window, "sliding_layers": layers}


def write_optional_window(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_optional_window` reads."""
    if config.sliding_window is None:
        return {"use_sliding_window": False}
    layers = config.sliding_layers
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in layers],
        # For versions before `layer_types`, which support no other pattern.
        "max_window_layers": layers.index(True) if any(layers) else len(layers),
    }
