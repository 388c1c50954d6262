"""Exports in other loaders: every tensor is found once, and the outputs equal ours."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import AxisType, Mesh
from safetensors import safe_open
from tiny_checkpoints import KINDS, VOCAB, again, build, tiered, write

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import Engine, Request

FAMILIES = list({name: kind for kind, (name, _) in reversed(KINDS.items())}.values())
"""The first kind of each."""
FAST = ("phi3", "qwen3-moe")
"""Have parameters that share a tensor, and tensors that share a parameter."""
SLOW = ("qwen2-window", "gemma2", "gemma3", "gemma3n", "deepseek-v3", "gpt-oss", "qwen3-next", "granite4")
"""Have caches of all other kinds: with windows, of some layers, borrowed, of latents, with sinks, and states."""

PROMPTS = (tuple(range(1, 13)), (40, 3, 77, 5, 96, 11, 60))
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=tiered(FAMILIES, fast=FAST, slow=SLOW))
def exported(request, tmp_path_factory):
    """A checkpoint of several files with a tokenizer; our parameters, no longer its own; their export."""
    source = write(tmp_path_factory.mktemp("source"), build(request.param), max_shard_size="20KB")
    embedded_tokenizer().save_pretrained(source)
    (source / "generation_config.json").write_text(json.dumps({"max_length": 24, "temperature": 0.7}))
    config = models.read_config(source)
    draw = np.random.default_rng(0).standard_normal
    loaded = models.load_params(source, config, "lm")
    params = jax.tree.map(lambda leaf: np.asarray(leaf) * (1 + 0.5 * draw(leaf.shape, np.float32)), loaded)
    params = jax.device_put(params)
    export = tmp_path_factory.mktemp("export")
    models.save_params(params, config, export, source=source, max_shard_bytes=20_000)
    return source, config, params, export


def greedy(directory):
    """Tokens that transformers draws."""
    model = again(directory)
    sampled = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        count = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        whole = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **count)
        sampled.append(whole[0, len(prompt) :].tolist())
    return sampled


def held(directory):
    """The file, dtype and shape of each tensor."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            names = list(file.keys())
            for name in names:
                assert name not in found, f"{name} is in two files"
                part = file.get_slice(name)
                found[name] = (path.name, part.get_dtype(), part.get_shape())
    return found


@pytest.mark.slow
def test_transformers_draws_the_tokens_that_our_engine_draws(exported):
    source, config, params, export = exported
    engine = Engine(
        config,
        Mesh(np.asarray(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,)),
        slots=2,
        max_prompt_tokens=16,
        max_response_tokens=NEW_TOKENS,
        stop_tokens=(),
        decode_tokens_per_dispatch=NEW_TOKENS,
    )
    engine.load(params, version=1)
    requests = [Request(index, prompt) for index, prompt in enumerate(PROMPTS)]
    ours = [list(completion.tokens) for completion in engine.generate(requests, Sampling(greedy=True), seed=0)]
    assert ours == greedy(export)
    assert ours != greedy(source)


def test_every_tensor_is_in_one_file_and_the_index_says_in_which(exported):
    source, _, _, export = exported
    ours, theirs = held(export), held(source)
    assert {name: about[1:] for name, about in ours.items()} == {name: about[1:] for name, about in theirs.items()}
    index = json.loads((export / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for name, (file, _, _) in ours.items()}
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)] and files[1:]
    assert not list(export.glob("*.unfinished"))
    assert index["metadata"]["total_size"] == sum(4 * np.prod(shape) for _, _, shape in ours.values())


def test_everything_beside_the_weights_comes_along(exported):
    source, _, _, export = exported
    fields = json.loads((export / "config.json").read_text())
    assert hasattr(transformers, fields["architectures"][0]) and len(fields["architectures"]) == 1
    assert fields["dtype"] == "float32" and fields["vocab_size"] == VOCAB
    assert fields == json.loads((source / "config.json").read_text())
    beside = {file.name for file in source.iterdir() if "model-" not in file.name} - {"model.safetensors.index.json"}
    assert beside >= {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for name in beside - {"config.json"}:
        assert (export / name).read_bytes() == (source / name).read_bytes(), name
    template = transformers.AutoTokenizer.from_pretrained(export).chat_template
    assert template == (source / "chat_template.jinja").read_text()
