"""gpt-oss: attention sinks, a window in every second layer, experts with biases and a clamped gate."""

from typing import Any

from jaxrlhf.models.config import ClampedGate, ModelConfig
from jaxrlhf.models.huggingface.families.family import LAYER, QKV_BIAS, WITHOUT_MLP, Family, StoredTensor, in_layers
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.llama import read_local_experts
from jaxrlhf.models.huggingface.families.windows import read_layer_types


def _read(given: Fields) -> dict[str, Any]:
    given.only("hidden_act", "silu")
    given.only("attention_bias", True)
    for name in ("initial_context_length", "experts_per_token", "num_experts"):
        given.take(name)  # implied by other fields
    given.default(num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, rope_theta=150_000.0)
    if not (given.take("rope_parameters") or given.take("rope_scaling")):
        raise given.error(
            "neither rope_parameters nor rope_scaling",
            "transformers then scales positions of gpt_oss by YaRN; set rope_type to 'yarn' or 'default'",
        )
    gate = ClampedGate(float(given.take("swiglu_alpha", 1.702)), float(given.take("swiglu_limit", 7.0)))
    return {
        "experts": read_local_experts(given, count=128, per_token=4, biases=True, activation=gate),
        "qkv_bias": True,
        "output_bias": True,
        "attention_sinks": True,
        "sliding_window": given.take("sliding_window", 128),
        "sliding_layers": read_layer_types(given, every=2),
    }


def _tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    experts = LAYER + "mlp.experts."
    both, bias = experts + "gate_up_proj", experts + "gate_up_proj_bias"
    # Gate and up of the same index are adjacent.
    gate, up = ("1", 0, 2), ("1", 1, 2)
    return {
        **WITHOUT_MLP,
        **QKV_BIAS,
        **in_layers(
            attention__output_bias=("self_attn.o_proj.bias", "D", "D"),
            attention__sinks=("self_attn.sinks", "N", "N"),
            mlp__router=("mlp.router.weight", "DE", "E D"),
            mlp__router_logit_bias=("mlp.router.bias", "E", "E"),
            mlp__experts__down=("mlp.experts.down_proj", "EFD", "E F D"),
            mlp__experts__down_bias=("mlp.experts.down_proj_bias", "ED", "E D"),
        ),
        "layers.mlp.experts.gate": StoredTensor(both, "EDF", "E D F1", inside=gate),
        "layers.mlp.experts.up": StoredTensor(both, "EDF", "E D F1", inside=up),
        "layers.mlp.experts.gate_bias": StoredTensor(bias, "EF", "E F1", inside=gate),
        "layers.mlp.experts.up_bias": StoredTensor(bias, "EF", "E F1", inside=up),
    }


GPT_OSS = Family("gpt_oss", "GptOss", _tensors, _read)
"""gpt-oss: all experts of a layer in one tensor, stored as MXFP4 in the published files."""
