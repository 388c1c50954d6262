"""Checkpoints that see or hear, read as their text part: the same logits, and exports of text alone."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import _DEEPSEEK, _GEMMA4, _LINEAR, VOCAB, build, tiered, tokens
from tiny_models import logits

from jaxrlhf import models

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_PIXTRAL = _TOWER | {"model_type": "pixtral", "head_dim": 8, "patch_size": 4, "image_size": 16}
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model", "patch_size": 4, "image_size": 16}
WHOLE = {
    "mistral3": ("Mistral3", _TEXT | {"model_type": "mistral", "sliding_window": None}, _PIXTRAL),
    "qwen3.5": (
        "Qwen3_5",
        _TEXT | _LINEAR | {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    ),
    "kimi-k2.5": (
        "Kimi_K25",
        _TEXT | _DEEPSEEK | {"model_type": "deepseek_v3", "q_lora_rank": 10, "head_dim": 4},
        _TOWER | {"patch_size": 4, "merge_kernel_size": (2, 2), "pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "gemma3": ("Gemma3", _TEXT | {"model_type": "gemma3_text"}, _SIGLIP),
    "gemma4": (
        "Gemma4",
        _TEXT
        | _GEMMA4
        | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}
        # The last layer's heads are those of the others, as its projections are in `with_what_nobody_reads`.
        | {"layer_types": ["full_attention"] * 2, "vocab_size_per_layer_input": VOCAB},
        _TOWER | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
    ),
}


def built(kind, *, tied):
    name, text, tower = WHOLE[kind]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=tower, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def with_published_names(file):
    """Names of Kimi's own files: transformers gives layers of text those of its tower when it saves them."""
    start = "language_model.model."
    renamed = {name.replace(f"{start}blocks.", f"{start}layers."): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})


def with_what_nobody_reads(file):
    """Keys and values of a layer that borrows them, which Gemma's own files have."""
    tensors, start = load_file(file), "model.language_model.layers."
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        tensors[f"{start}1.self_attn.{name}"] = tensors[f"{start}0.self_attn.{name}"] + 1
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", tiered(WHOLE, fast=["mistral3"], slow=["kimi-k2.5"]))
@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_is_a_model_of_its_own(kind, tied, tmp_path):
    theirs, source = built(kind, tied=tied), tmp_path / "source"
    theirs.save_pretrained(source)
    if kind == "kimi-k2.5":
        with_published_names(source / "model.safetensors")
    if kind == "gemma4":
        with_what_nobody_reads(source / "model.safetensors")
    config = models.read_config(source)
    assert config.tie_embeddings == tied
    with pytest.warns(RuntimeWarning, match=r"more than a text model; \d+ tensors are not read, such as "):
        params = models.load_params(source, config, "lm")
    token_RW = tokens((2, 20))
    with torch.no_grad():
        expected = theirs(torch.tensor(token_RW, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits(params, config, token_RW), expected, atol=1e-4)
    with pytest.warns(RuntimeWarning, match="more than a text model"):
        models.save_params(params, config, tmp_path / "out", source=source)
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert "vision_config" not in fields and not any(
        "vision" in name for name in load_file(tmp_path / "out/model.safetensors")
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        found = again(torch.tensor(token_RW, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_published_name_of_a_family_is_known(tmp_path):
    text = build("deepseek-v3").config.to_dict() | {"model_type": "kimi_k2"}
    fields = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert models.read_config(tmp_path).family == "deepseek_v3"
