"""Qwen3 (dense): normalised q and k heads, head width free of the hidden size."""

from jaxrlhf.models.families.family import DECODER, QK_NORM, Family

QWEN3 = Family(
    name="qwen3",
    causal="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    tensors=DECODER | QK_NORM,
    qk_norm=True,
    head_dim=128,
    fixed={"use_sliding_window": False, "attention_bias": False},
)
