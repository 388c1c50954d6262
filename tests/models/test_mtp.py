"""Layers that predict the second next token: exports have their tensors, and their numbers are those of the formula,
which is written here in torch around a layer of transformers."""

import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import again, build, tokens, write

from jaxrlhf import models
from jaxrlhf.config import Refusal
from jaxrlhf.models.attention.attention import Segments
from jaxrlhf.models.mtp.layer import mtp_rows, next_tokens
from jaxrlhf.models.rope import rotations

KINDS = ("deepseek-v3", "glm4-moe", "qwen3-next", "qwen3.5")
AFTER = {"embed_norm": "enorm", "hidden_norm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}
APART = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "join": "fc", "norm": "norm"}

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Ends of names of copies of the embedding and the head, which files of the first two families have."""


def own_tensors(kind, model):
    """Names in the files of random tensors of the further layer."""
    generator = torch.Generator().manual_seed(5)
    width, count = model.config.hidden_size, model.config.num_hidden_layers
    qwen = kind.startswith("qwen")
    prefix, names = ("mtp.", APART) if qwen else (f"model.layers.{count}.", AFTER)
    shapes = {"join": (width, 2 * width)}
    found = {f"{prefix}{theirs}.weight": shapes.get(ours, (width,)) for ours, theirs in names.items()}
    inside = "mtp.layers.0." if qwen else prefix
    for name, tensor in stored_layer(kind, model).items():
        found[inside + name] = tuple(tensor.shape)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in found.items()}


def stored_layer(kind, model):
    """Tensors of such a layer under their names in a file, experts apart."""
    layers = model.model.layers
    at = max(index for index, layer in enumerate(layers) if hasattr(layer, "self_attn"))
    return {
        name.removeprefix(f"model.layers.{at}."): tensor
        for name, tensor in written(model).items()
        if name.startswith(f"model.layers.{at}.")
    }


def written(model):
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), model)
        return load_file(Path(folder) / "model.safetensors")


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    """A checkpoint of transformers with a further layer in its file; the model, and the layer's tensors."""
    folder, model = tmp_path_factory.mktemp("source"), build(request.param)
    write(folder, model)
    own = own_tensors(request.param, model)
    stored = load_file(folder / "model.safetensors") | own
    if not request.param.startswith("qwen"):
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        copies = model.model.embed_tokens.weight, model.lm_head.weight
        stored |= {prefix + name: tensor.clone() for name, tensor in zip(COPIES, copies, strict=True)}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return request.param, folder, model, own


def test_an_export_has_the_tensors_that_were_loaded(checkpoint, tmp_path):
    kind, folder, _, _ = checkpoint
    config = models.read_config(folder, mtp=True)
    params = models.load_params(folder, config, "lm")
    models.save_params(params, config, tmp_path, source=folder)
    theirs, ours = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)
    assert models.has_mtp(tmp_path) and models.has_mtp(folder)
    count = json.loads((tmp_path / "config.json").read_text())
    assert count["mtp_num_hidden_layers" if kind.startswith("qwen") else "num_nextn_predict_layers"] == 1


def reference(kind, folder, model, own, token_PS, tmp_path):
    """Logits of the formula, with the layer of a model of transformers that has the further layer's tensors."""
    names = APART if kind.startswith("qwen") else AFTER
    prefix = "mtp." if kind.startswith("qwen") else f"model.layers.{model.config.num_hidden_layers}."
    inside = "mtp.layers.0." if kind.startswith("qwen") else prefix
    at = max(index for index, layer in enumerate(model.model.layers) if hasattr(layer, "self_attn"))
    outer = {f"{prefix}{name}.weight" for name in names.values()}
    moved = {name.replace(inside, f"model.layers.{at}."): each for name, each in own.items() if name not in outer}
    other = write(tmp_path / "other", model)
    save_file(load_file(other / "model.safetensors") | moved, other / "model.safetensors", {"format": "pt"})
    layer = again(other).model.layers[at]

    def normed(state, name):
        scale = own[f"{prefix}{names[name]}.weight"] + (1.0 if kind.startswith("qwen") else 0.0)
        return state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * scale

    token = torch.tensor(token_PS, dtype=torch.long)
    count = token.shape[1]
    with torch.no_grad():
        hidden = model.model(token).last_hidden_state[:, :-1]
        embedded = normed(model.model.embed_tokens(token[:, 1:]), "embed_norm")
        state = torch.cat([embedded, normed(hidden, "hidden_norm")], -1) @ own[f"{prefix}{names['join']}.weight"].T
        place = torch.arange(count - 1)[None].expand(len(token), -1)
        mask = torch.full((count - 1, count - 1), -torch.inf).triu(1)[None, None]
        turn = model.model.rotary_emb(state, place)
        output = layer(state, attention_mask=mask, position_ids=place, position_embeddings=turn)
        state = output[0] if isinstance(output, tuple) else output
        return model.lm_head(normed(state, "norm")).numpy()


def test_the_layer_computes_the_formula(checkpoint, tmp_path):
    kind, folder, model, own = checkpoint
    config, token_PS = models.read_config(folder, mtp=True), tokens((2, 17))
    params = models.load_params(folder, config, "lm")
    place_PS = np.broadcast_to(np.arange(17, dtype=np.int32), token_PS.shape)
    segment_PS = np.ones_like(place_PS)
    hidden_PSD = models.hidden_states(params, config, token_PS, place_PS, segment_PS).hidden_RWD
    next_PS = next_tokens(jnp.asarray(token_PS), place_PS < 16)
    turn, mask = rotations(config, place_PS), Segments(segment_PS)
    further_PSD, _ = mtp_rows(params, config, hidden_PSD, next_PS, turn, mask, models.ONE_DEVICE)
    ours = np.asarray(models.logits(params, config, further_PSD))[:, :-1]
    theirs = reference(kind, folder, model, own, token_PS, tmp_path)
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def again_written(folder):
    return (json.dumps(json.loads((folder / "config.json").read_text()), indent=2, sort_keys=True) + "\n").encode()


def test_without_the_setting_the_model_is_as_before(checkpoint, tmp_path):
    _, folder, _, own = checkpoint
    config = models.read_config(folder)
    params = models.load_params(folder, config, "lm")
    assert "mtp" not in params
    models.save_params(params, config, tmp_path, source=folder)
    assert not own.keys() & load_file(tmp_path / "model.safetensors").keys()
    assert not models.has_mtp(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == again_written(folder)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    write(tmp_path / "llama", build("llama"))
    with pytest.raises(Refusal, match="llama checkpoint with 0 layers"):
        models.read_config(tmp_path / "llama", mtp=True)
    write(tmp_path / "qwen", build("qwen3.5"))
    assert not models.has_mtp(tmp_path / "qwen")
    with pytest.raises(Refusal, match=r"'mtp\.\S+' of shape"):
        models.load_params(tmp_path / "qwen", models.read_config(tmp_path / "qwen", mtp=True), "lm")
