"""Layers of a checkpoint that have a window, by `layer_types` or by the fields that said so before."""

from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.fields import Fields

_KINDS = {"full_attention": False, "sliding_attention": True}


def read_layer_types(given: Fields) -> tuple[bool, ...] | None:
    """Flags of the layers that have the window; None where the file does not say.

    Raises:
      Refusal: A layer is of another kind, or there are more or fewer than the model has.
    """
    kinds = given.take("layer_types")
    if kinds is None:
        return None
    if unread := set(kinds) - set(_KINDS):
        raise given.error(f"layer_types {sorted(unread)}", f"computed are {sorted(_KINDS)}")
    if len(kinds) != given.need("num_hidden_layers"):
        raise given.error(f"{len(kinds)} layer_types", f"num_hidden_layers is {given.need('num_hidden_layers')}")
    return tuple(_KINDS[kind] for kind in kinds)


def write_layer_types(config: ModelConfig) -> list[str]:
    """`layer_types` for `config.sliding_layers`."""
    names = {slides: kind for kind, slides in _KINDS.items()}
    return [names[slides] for slides in config.sliding_layers]


def read_optional_window(given: Fields) -> dict[str, Any]:
    """A window that `use_sliding_window` switches on, in the layers from `max_window_layers` on."""
    used, window = given.take("use_sliding_window", False), given.take("sliding_window", 4096)
    first, layers = given.take("max_window_layers", 28), read_layer_types(given)
    if not used:
        if layers and any(layers):
            raise given.error("layer_types with 'sliding_attention'", "use_sliding_window is not true")
        return {}
    if window is None:
        raise given.error("use_sliding_window=True", "sliding_window is missing")
    if layers is None:
        layers = tuple(index >= first for index in range(given.need("num_hidden_layers")))
    return {"sliding_window": window, "sliding_layers": layers}


def write_optional_window(config: ModelConfig) -> dict[str, Any]:
    """Fields that `read_optional_window` reads."""
    if config.sliding_window is None:
        return {"use_sliding_window": False}
    layers = config.sliding_layers
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_types(config),
        # What versions before `layer_types` go by; they know no other pattern.
        "max_window_layers": layers.index(True) if any(layers) else len(layers),
    }
