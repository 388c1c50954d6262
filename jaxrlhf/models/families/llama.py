"""Llama 3.x: no biases, rotary frequencies stretched from 3.1 on."""

from jaxrlhf.models.families.family import DECODER, Family

LLAMA = Family(
    name="llama",
    causal="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    tensors=DECODER,
    fixed={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
)
