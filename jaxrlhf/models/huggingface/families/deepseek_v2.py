"""DeepSeek-V2: the best experts, or the best of the best groups."""

from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import Family
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.latent_attention import read_latent, tensors, write_latent


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.only("scoring_func", "softmax")
    given.only("topk_method", "greedy", "group_limited_greedy")
    given.only("norm_topk_prob", False)
    grouped = given.take("topk_method") == "group_limited_greedy"
    groups, chosen = given.take("n_group"), given.take("topk_group")
    inner = given.need("moe_intermediate_size")
    experts = Experts(
        count=given.need("n_routed_experts"),
        per_token=given.need("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=inner * given.need("n_shared_experts"),
        normalised=False,
        scaling=float(given.take("routed_scaling_factor", 1.0)),
        groups=groups if grouped else 1,
        groups_per_token=chosen if grouped else 1,
        loss_coefficient=float(given.take("aux_loss_alpha", 0.0)),
    )
    return {"experts": experts, **read_latent(given, interleaved=True, dense_layers=0)}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    grouped = config.experts is not None and config.experts.groups > 1
    return write_latent(config) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    causal="DeepseekV2ForCausalLM",
    classifier="DeepseekV2ForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
