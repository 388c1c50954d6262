"""SmolLM3: by default, every fourth layer has no rotary positions."""

from typing import Any

from jaxrlhf.models.huggingface.families.family import DECODER, Family
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.windows import read_layer_types


def _read(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.only("mlp_bias", False)
    given.default(num_key_value_heads=4, rope_theta=2_000_000.0)
    count, interval = given.need("num_hidden_layers"), given.take("no_rope_layer_interval", 4)
    turns = given.take("no_rope_layers") or [(index + 1) % interval != 0 for index in range(count)]
    if len(turns) < count:
        raise given.error(f"{len(turns)} no_rope_layers", f"num_hidden_layers is {count}")
    turns = tuple(map(bool, turns[:count]))
    layers, window = read_layer_types(given), given.take("sliding_window")
    # A window needs both fields; by default the layers that do not rotate have the window.
    slides = bool(given.take("use_sliding_window", False)) and window is not None
    return {
        "tie_embeddings": bool(given.take("tie_word_embeddings", True)),
        "rope_layers": turns,
        "sliding_window": window if slides else None,
        "sliding_layers": (layers or tuple(not turn for turn in turns)) if slides else (),
    }


SMOLLM3 = Family("smollm3", "SmolLM3", lambda config: DECODER, _read)
"""SmolLM3: some layers have no rotary positions; these layers may have a window."""
