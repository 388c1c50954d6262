"""Parity with transformers: the same checkpoint gives the same numbers, in and out again."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tiny_checkpoints import KINDS, VOCAB, again, build, tiered, tokens, write

from jaxrlhf import models
from jaxrlhf.config import FromScratch, Refusal
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.huggingface.save import save_description

TOLERANCE = 1e-4
DESCRIBED = [kind for kind, (name, _) in KINDS.items() if name in ("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "DeepseekV2")]
"""Kinds whose config.json is written from their shape, for models from scratch and plans of known checkpoints."""


@pytest.fixture(scope="module", params=tiered(KINDS))
def pair(request, tmp_path_factory):
    """A transformers model, and ours read from its files."""
    theirs = build(request.param)
    path = write(tmp_path_factory.mktemp("checkpoint"), theirs)
    config = models.read_config(path)
    return theirs, config, models.load_params(path, config, "lm"), path


def their_logits(model, token_RW, mask_RW=None):
    mask = None if mask_RW is None else torch.tensor(mask_RW)
    with torch.no_grad():
        return model(torch.tensor(token_RW, dtype=torch.long), attention_mask=mask).logits.numpy()


@functools.partial(jax.jit, static_argnums=1)
def our_logits(params, config, token_RW, position_RW, segment_RW):
    hidden_RWD = models.hidden_states(params, config, token_RW, position_RW, segment_RW).hidden_RWD
    return models.logits(params, config, hidden_RWD)


def plain(token_RW):
    """Positions and segments of rows that each hold one full sequence."""
    position_RW = np.broadcast_to(np.arange(token_RW.shape[1], dtype=np.int32), token_RW.shape)
    return position_RW, np.ones(token_RW.shape, np.int32)


def test_logits_of_whole_padded_and_packed_rows(pair):
    theirs, config, params, _ = pair
    token_RW = tokens((3, 40))
    position_RW, segment_RW = np.zeros((2, 3, 40), np.int32)
    expected = np.zeros((3, 40, VOCAB), np.float32)
    for row, lengths in enumerate([[40], [17], [11, 25]]):
        start = 0
        for segment, length in enumerate(lengths, start=1):
            here = slice(start, start + length)
            position_RW[row, here], segment_RW[row, here] = np.arange(length), segment
            expected[row, here] = their_logits(theirs, token_RW[row : row + 1, here])[0]
            start += length
    ours = our_logits(params, config, token_RW, position_RW, segment_RW)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours[segment_RW > 0], expected[segment_RW > 0], atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("pair", tiered(DESCRIBED, slow=["qwen3-yarn"]), indirect=True)
def test_export_without_its_source_is_the_same_model(pair, tmp_path):
    theirs, config, params, _ = pair
    models.save_params(params, config, tmp_path)
    assert models.read_config(tmp_path) == config
    exported = again(tmp_path)
    before, after = theirs.state_dict(), exported.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    token_RW = tokens((2, 40))
    np.testing.assert_allclose(their_logits(exported, token_RW), their_logits(theirs, token_RW), atol=1e-6)


def test_a_configuration_that_is_only_copied_needs_its_source(tmp_path):
    config = models.read_config(write(tmp_path / "in", build("gemma2")))
    with pytest.raises(Refusal, match=r"config\.json of a gemma2 model can only be copied; set source"):
        save_description(config, tmp_path / "out")


def test_export_of_an_import_is_the_same_checkpoint(pair, tmp_path):
    _, config, params, source = pair
    models.save_params(params, config, tmp_path / "out", source=source)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    assert sum(tensor.size for tensor in before.values()) == weight_counts(config).total
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.tobytes() == after[name].tobytes(), name
    for file in ("config.json", "generation_config.json"):
        assert json.loads((source / file).read_text()) == json.loads((tmp_path / "out" / file).read_text())


def test_sharded_half_precision_round_trip(tmp_path):
    theirs = build("phi3").to(torch.bfloat16)
    source = write(tmp_path / "in", theirs, max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    config = models.read_config(source)
    params = models.load_params(source, config, "lm")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    models.save_params(params, config, tmp_path / "out", dtype=jnp.bfloat16, source=source, max_shard_bytes=20_000)

    def everything(directory):
        parts = [load_file(file) for file in sorted(directory.glob("*.safetensors"))]
        assert len(parts) > 1
        return {name: tensor.tobytes() for part in parts for name, tensor in part.items()}

    assert everything(source) == everything(tmp_path / "out")
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "out/config.json").read_text())
    exported = again(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, exported.state_dict()[name]), name


def test_from_scratch_loads_in_transformers(tmp_path):
    settings = FromScratch(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
    config = models.scratch_config(settings, vocab_size=VOCAB)
    params = jax.jit(functools.partial(models.init_params, config, "lm"))(jax.random.key(0))
    models.save_params(params, config, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    token_RW = tokens((2, 30))
    expected = their_logits(theirs, token_RW)
    ours = our_logits(params, config, token_RW, *plain(token_RW))
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)
    assert (ours.argmax(-1) == expected.argmax(-1)).all()


def test_score_head(tmp_path):
    theirs = build("llama3", "ForSequenceClassification", num_labels=1)
    source = write(tmp_path / "in", theirs)
    config = models.read_config(source)
    params = models.load_params(source, config, "score")
    token_RW, length_R = tokens((3, 20)), np.array([20, 5, 13])
    position_RW, segment_RW = plain(token_RW)
    real_RW = position_RW < length_R[:, None]
    states = jax.jit(models.hidden_states, static_argnums=1)
    hidden_RWD = states(params, config, token_RW, position_RW, segment_RW * real_RW).hidden_RWD
    ours = models.score(params, hidden_RWD, jnp.arange(3), length_R - 1)
    expected = their_logits(theirs, np.where(real_RW, token_RW, 0), real_RW.astype(np.int64))[:, 0]
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)

    models.save_params(params, config, tmp_path / "out", source=source)
    exported = again(tmp_path / "out")
    np.testing.assert_allclose(
        their_logits(exported, np.where(real_RW, token_RW, 0), real_RW.astype(np.int64))[:, 0], expected, atol=1e-6
    )
    critic = models.load_params(source, config, "value")
    np.testing.assert_array_equal(critic["head"], params["head"])


def test_value_head_on_a_language_model_starts_at_zero(tmp_path):
    source = write(tmp_path, build("qwen2"))
    params = models.load_params(source, models.read_config(source), "value")
    assert params["head"].shape == (32,) and not params["head"].any()


def test_names_of_older_transformers(tmp_path):
    """`rope_theta` and `rope_scaling` beside each other, as transformers 4 wrote them."""
    source = write(tmp_path, build("llama3"))
    new = models.read_config(source)
    fields = json.loads((source / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (source / "config.json").write_text(json.dumps(fields))
    assert models.read_config(source) == new
    assert new.rope_scaling is not None
    (source / "config.json").write_text(json.dumps(fields | {"rope_parameters": rope}))
    assert models.read_config(source) == new
