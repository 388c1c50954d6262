"""Checkpoints that see: features, logits, decoding and exports as transformers has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeing
import torch
import transformers
from safetensors.numpy import load_file
from tiny_checkpoints import build, tiered, write

from jaxrlhf import models
from jaxrlhf.config import Refusal
from jaxrlhf.models.vision.rows import RowLayout, StripShape, mrope_positions

TOLERANCE = 1e-4
KINDS = tiered(seeing.KINDS, fast=["qwen2.5-vl"], slow=["qwen3-vl"])
ROOM = StripShape(strips=3, patches=60)
"""One image fills a strip, the other leaves it part empty, and a row may have strips without any."""


class Loaded:
    """A checkpoint as both read it."""

    def __init__(self, kind, directory):
        self.kind, self.directory = kind, directory
        self.model = seeing.build(kind)
        self.model.save_pretrained(directory)
        self.config = models.read_config(directory, vision=True)
        self.params = models.load_params(directory, self.config, "lm")
        self.vision = self.config.vision
        self.pixels = seeing.pixels_of(self.vision)

    def expected(self, sequence, more=()):
        tokens, images = sequence
        return seeing.expected_logits(self.model, self.vision, [*tokens, *more], images, self.pixels)

    def rows(self, sequences, places, shape):
        """Arrays of sequences that begin at these places, `(row, first column)`, and the images of their rows."""
        token_RW, position_RW, segment_RW, block_RW = np.zeros((4, *shape), np.int32)
        feature_RW, mrope_position_RW3 = np.full(shape, -1, np.int32), np.zeros((*shape, 3), np.int32)
        of_row = [
            [one for (_, images), at in zip(sequences, places, strict=True) if at[0] == row for one in images]
            for row in range(shape[0])
        ]
        layout = RowLayout(self.vision, of_row, ROOM)
        for number, ((tokens, images), (row, first)) in enumerate(zip(sequences, places, strict=True), 1):
            at = row, slice(first, first + len(tokens))
            token_RW[at], position_RW[at], segment_RW[at] = tokens, np.arange(len(tokens)), number
            feature_RW[at], block_RW[at] = layout.tokens(row, images, len(tokens))
            mrope_position_RW3[at] = mrope_positions(self.vision, images, len(tokens))
        tables = feature_RW, block_RW, mrope_position_RW3
        images = layout.rows(range(shape[0]), lambda one: self.pixels[int(one.digest)], *tables)
        return jax.tree.map(jnp.asarray, (token_RW, position_RW, segment_RW, images))


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory):
    return Loaded(request.param, tmp_path_factory.mktemp("sees"))


every_kind = pytest.mark.parametrize("checkpoint", KINDS, indirect=True)


@every_kind
def test_logits_of_packed_rows(checkpoint):
    """A row with text alone, images twice in a row, and one image beside text, as one by one."""
    vision = checkpoint.vision
    sequences = [
        seeing.prompt(vision, 5, (0,), 3, (1,), 9),
        seeing.prompt(vision, 2, (1,), 7),
        seeing.prompt(vision, 11),
    ]
    lengths = [len(tokens) for tokens, _ in sequences]
    places = [(0, 0), (0, lengths[0]), (1, 2)]
    rows = checkpoint.rows(sequences, places, (2, lengths[0] + lengths[1] + 3))

    @jax.jit
    def run(params, token_RW, position_RW, segment_RW, images):
        rows = token_RW, position_RW, segment_RW
        hidden_RWD = models.hidden_states(params, checkpoint.config, *rows, images=images).hidden_RWD
        return models.logits(params, checkpoint.config, hidden_RWD)

    logit_RWV = run(checkpoint.params, *rows)
    for sequence, length, (row, first) in zip(sequences, lengths, places, strict=True):
        expected = checkpoint.expected(sequence)
        np.testing.assert_allclose(logit_RWV[row, first : first + length], expected, atol=TOLERANCE)


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("chunk_tokens", [pytest.param(None, marks=pytest.mark.seeds), 8])
def test_prefill_and_decoding(checkpoint, chunk_tokens):
    """Prompts padded beside each other, whole and chunk by chunk; tokens behind images continue at their positions."""
    vision, config, params = checkpoint.vision, checkpoint.config, checkpoint.params
    sequences = [seeing.prompt(vision, 5, (0,), 3, (1,), 9), seeing.prompt(vision, 2, (1,)), seeing.prompt(vision, 11)]
    lengths = np.array([len(tokens) for tokens, _ in sequences], np.int32)
    width = int(lengths.max()) + 3
    token_PS, _, _, images = checkpoint.rows(sequences, [(row, 0) for row in range(3)], (3, width))
    prefill = jax.jit(functools.partial(models.prefill, chunk_tokens=chunk_tokens), static_argnums=1)
    if vision.both_ways and chunk_tokens:
        with pytest.raises(ValueError, match="whole"):
            prefill(params, config, token_PS, lengths, images=images)
        return
    output = prefill(params, config, token_PS, lengths, images=images)
    logits = [models.logits(params, config, output.hidden_PD)]
    slots = jnp.arange(3)
    cache = models.insert_prefix(models.empty_cache(config, slots=3, capacity=width + 4), output.prefix, slots, slots)
    layers = models.unstack_layers(params, config)
    turns = [mrope_positions(vision, images, len(tokens) + 1) for tokens, images in sequences]
    offset_B = jnp.array(
        [mrope_position_T3[-1, 0] - len(mrope_position_T3) + 1 for mrope_position_T3 in turns], jnp.int32
    )
    assert ((offset_B[:2] < 0) == (vision.sections is not None)).all() and offset_B[2] == 0
    decode = jax.jit(models.decode, static_argnums=2)
    more = np.random.default_rng(3).integers(1, 80, (3, 3)).astype(np.int32)
    for step in range(3):
        decoded = decode(layers, params, config, more[:, step], lengths + step, cache, offset_B=offset_B)
        cache = decoded.cache
        logits.append(models.logits(params, config, decoded.hidden_BD))
    for row, sequence in enumerate(sequences):
        expected = checkpoint.expected(sequence, more[row].tolist())[lengths[row] - 1 :]
        np.testing.assert_allclose([step[row] for step in logits], expected, atol=TOLERANCE)


@every_kind
def test_exports(checkpoint, tmp_path):
    """The files are those of the source; without it, transformers loads what is written for a tower from scratch."""
    models.save_params(checkpoint.params, checkpoint.config, tmp_path / "same", source=checkpoint.directory)
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint.directory, tmp_path / "same"))
    if checkpoint.kind == "qwen2.5-vl":
        models.save_params(checkpoint.params, checkpoint.config, tmp_path / "new")
        found = getattr(transformers, type(checkpoint.model).__name__).from_pretrained(tmp_path / "new").state_dict()
        expected = checkpoint.model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
        assert models.read_config(tmp_path / "new", vision=True) == checkpoint.config
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)


def test_text_alone_has_no_tower(tmp_path):
    with pytest.raises(Refusal, match="vision=True"):
        models.read_config(write(tmp_path, build("qwen2")), vision=True)
