"""Qwen2 and Qwen2.5: biases on q, k and v."""

from jaxrlhf.models.families.family import DECODER, QKV_BIAS, Family

QWEN2 = Family(
    name="qwen2",
    causal="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    tensors=DECODER | QKV_BIAS,
    qkv_bias=True,
    fixed={"use_sliding_window": False},
)
