"""The published SmolLM2: its file is read as transformers reads it, and the whole path of a user works on it."""

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxrlhf import models
from jaxrlhf.data.tokenizer import load_tokenizer
from jaxrlhf.models.huggingface.hub import resolve
from scripts.tools.get_smollm2 import NAME, fetch
from tests.models.test_transformers import our_logits, plain

pytestmark = pytest.mark.real

TEXT = (
    "Natalia sold clips to 48 of her friends in April,\n\nand then 24 in May. How many clips did she sell altogether?"
)


@pytest.fixture(scope="module")
def theirs(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()


def test_weights_and_logits_are_those_that_transformers_reads(smollm2, theirs):
    config = models.read_config(smollm2)
    params = models.load_params(smollm2, config, "lm")
    assert (config.num_layers, config.vocab_size, config.tie_embeddings) == (30, 49_152, True)
    np.testing.assert_array_equal(params["embed"], theirs.model.embed_tokens.weight.detach().numpy())
    up_DF = params["layers"]["mlp"]["up"][7]
    np.testing.assert_array_equal(up_DF, theirs.model.layers[7].mlp.up_proj.weight.detach().numpy().T)
    token_RW = np.array([load_tokenizer(str(resolve(smollm2))).encode(TEXT)], np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(token_RW)).logits.numpy()
    np.testing.assert_allclose(
        jax.jit(our_logits, static_argnums=1)(params, config, token_RW, *plain(token_RW)), expected, atol=2e-4
    )


def test_text_is_cut_as_the_model_was_trained(smollm2):
    """SmolLM2's own rules take each digit by itself first, so two line breaks before one stay a token."""
    tokenizer = load_tokenizer(str(resolve(smollm2)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x\n\n12 3")) == ["x", "ĊĊ", "1", "2", "Ġ", "3"]
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>")[0] == 1 and tokenizer.eos_token_id == 2


def test_the_script_does_nothing_where_the_file_is(smollm2):
    assert smollm2.name == NAME and fetch(smollm2.parent) == smollm2
