"""Decoder of every supported model family: parameters, forward passes, heads and checkpoints."""

from jaxrlhf.models.attention.kernel_choice import choose_execution
from jaxrlhf.models.attention.kv_cache import LayerCache, Prefix, empty_cache, insert_prefix
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.decoder import DecodeOutput, HiddenStates, Past, PrefillOutput, decode, hidden_states, prefill
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.from_config import from_scratch, model_config, tokenizer_of, tokenizer_path
from jaxrlhf.models.heads import (
    TokenOutput,
    logits,
    padded_logits,
    score,
    token_logp,
    token_scores,
    values,
)
from jaxrlhf.models.huggingface.config import labels_steps, read_config, scratch_config, sees
from jaxrlhf.models.huggingface.hub import resolve
from jaxrlhf.models.huggingface.load import has_mtp, label_bias, load_params
from jaxrlhf.models.huggingface.save import save_params
from jaxrlhf.models.parameters import Param, declare, init_params, param_dims, param_shapes
from jaxrlhf.models.pipeline import Pipeline, pipeline_over
from jaxrlhf.models.stack import joined_parts, layer_parts, layer_places, unstack_layer, unstack_layers
from jaxrlhf.models.vision.rows import ImageRows, Pixels
