"""DeepSeek-V3: experts by sigmoid scores and a bias, of the groups whose best pairs are best."""

from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import Family
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.latent_attention import read_latent, tensors, write_latent


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.only("scoring_func", "sigmoid")
    given.only("topk_method", "noaux_tc")
    inner = given.need("moe_intermediate_size")
    experts = Experts(
        count=given.need("n_routed_experts"),
        per_token=given.need("num_experts_per_tok"),
        intermediate_size=inner,
        shared_intermediate_size=inner * given.need("n_shared_experts"),
        scores="sigmoid",
        normalised=bool(given.take("norm_topk_prob", True)),
        scaling=float(given.take("routed_scaling_factor", 2.5)),
        bias=True,
        groups=given.take("n_group", 8),
        groups_per_token=given.take("topk_group", 4),
        group_best=2,
        loss_coefficient=float(given.take("aux_loss_alpha", 0.0)),
    )
    interleaved = bool(given.take("rope_interleave", True))
    return {"experts": experts, **read_latent(given, interleaved=interleaved, dense_layers=3)}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    interleaved = config.latent is not None and config.latent.interleaved
    return write_latent(config) | {"topk_method": "noaux_tc", "rope_interleave": interleaved}


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    causal="DeepseekV3ForCausalLM",
    classifier="DeepseekV3ForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
