"""OLMo 2 and 3: norms after attention and MLP, and q and k norms over all heads together."""

from typing import Any

from jaxrlhf.models.huggingface.families.family import DECODER, NORMS_ACROSS_HEADS, Family, in_layers
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.rope_fields import read_two_ropes
from jaxrlhf.models.huggingface.families.windows import read_layer_types


def _read_olmo2(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.default(rms_norm_eps=1e-5, num_key_value_heads=given.take("num_attention_heads"))
    return {"norms": "post", "qk_norm": True, "qk_norm_across_heads": True}


_TENSORS = {
    **{path: stored for path, stored in DECODER.items() if path not in ("layers.attention_norm", "layers.mlp_norm")},
    **NORMS_ACROSS_HEADS,
    **in_layers(
        attention_output_norm=("post_attention_layernorm.weight", "D", "D"),
        mlp_output_norm=("post_feedforward_layernorm.weight", "D", "D"),
    ),
}

OLMO2 = Family("olmo2", "Olmo2", lambda config: _TENSORS, _read_olmo2)
"""OLMo 2: norms come after attention and MLP, and one norm goes over all q heads, one over all k heads."""


def _read_olmo3(given: Fields) -> dict[str, Any]:
    theta = given.take("rope_theta") or 500_000.0
    return {
        **_read_olmo2(given),
        "sliding_window": given.take("sliding_window", 4096),
        "sliding_layers": read_layer_types(given, every=4),
        **read_two_ropes(given, full_theta=theta, sliding_theta=theta),
    }


OLMO3 = Family("olmo3", "Olmo3", lambda config: _TENSORS, _read_olmo3)
"""OLMo 3: OLMo 2 with a window in three of four layers; rotary positions of these layers are not scaled."""
