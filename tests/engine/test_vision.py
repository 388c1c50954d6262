"""Prompts with images: samples as the teacher-forced model has them, and a tower that runs once for all responses."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from packed_arrays import PackedArrays
from tiny_models import DECODER, random_params

from jaxrlhf import models
from jaxrlhf.batch import Image, Problem
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import Sections, Vision
from jaxrlhf.workers.generation.rollouts import to_rollout

pytestmark = pytest.mark.usefixtures("programs")

IMAGE = 90
VISION = Vision(
    family="qwen2_5_vl",
    image_token=IMAGE,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    patch_size=2,
    out_size=32,
    frames=2,
    norm="rms",
    gated=True,
    activation="silu",
    patch_bias=False,
    window=2,
    full_layers=(1,),
    sections=Sections((2, 1, 1)),
)
CONFIG = DECODER.__class__(**{**vars(DECODER), "vision": VISION})
WIDTH, RESPONSE = 48, 6


@functools.cache
def weights():
    return random_params(CONFIG)


def pixels(image):
    seed, count = int(image.digest), int(np.prod(image.grid))
    return np.random.default_rng(seed).normal(size=(count, VISION.patch_values)).astype(np.float32)


def problem(number, *parts):
    """Return a problem whose parts are numbers of tokens, or the number and grid of an image."""
    rng, tokens, images = np.random.default_rng(7), [], []
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(1, 80, part).tolist()
            continue
        digest, *size = part
        images.append(Image("drawn", str(digest), (1, *size), len(tokens), size[0] * size[1] // 4))
        tokens += [IMAGE] * images[-1].tokens
    return Problem(number, "", tuple(tokens), images=tuple(images))


PROBLEMS = [
    problem(0, 3, (1, 6, 4), 4),
    problem(1, 3, (2, 6, 4), 4),  # the same tokens, another image
    problem(2, 2, (3, 2, 6), 2, (1, 6, 4), 3),
    problem(3, 9),
]


def engine(**changes):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sizes = {"slots": 8, "max_prompt_tokens": WIDTH - RESPONSE, "max_response_tokens": RESPONSE, "stop_tokens": ()}
    made = Engine(CONFIG, mesh, **sizes, decode_tokens_per_dispatch=3, pixels=pixels, **changes)
    made.load(jax.device_put(weights(), jax.NamedSharding(mesh, jax.P())), version=1)
    return made


@functools.cache
def sampled():
    """Two responses to each problem, and the engine that made them."""
    made = engine()
    asked = [
        Request(2 * one.prompt_id + copy, one.prompt_tokens, images=one.images) for one in PROBLEMS for copy in (0, 1)
    ]
    return made, made.generate(asked, Sampling(), seed=0)


def rollout():
    prompts = [one for one in PROBLEMS for _ in range(2)]
    return to_rollout(prompts, sampled()[1], width=WIDTH)


def test_the_tower_runs_once_for_all_responses():
    made, _ = sampled()
    assert made.prefill.images == sum(len(one.images) for one in PROBLEMS)


@pytest.mark.parametrize("shares", [True, False])
def test_samples_are_those_of_packed_rows(shares):
    """Each sampled token's log-probability is what training computes of it, with prompts in rows once and for each."""
    batch = rollout()
    packing = PackedArrays(batch.sequences, rows=2, row_tokens=4 * WIDTH, shares=shares, vision=VISION, pixels=pixels)

    @jax.jit
    def run(params, rows):
        tokens = rows.token_RW, rows.position_RW, rows.segment_RW
        output = models.hidden_states(params, CONFIG, *tokens, shared_prefix=rows.shared_prefix, images=rows.images)
        return models.token_logp(params, CONFIG, output.hidden_RWD, rows.token_RW, rows.mask_RW).logp

    rows = [*packing.rows()]
    assert all((part.shared_prefix is not None) == shares for part in rows)
    logp_BT = packing.unpack(np.stack([run(weights(), jax.tree.map(jnp.asarray, part)) for part in rows]))
    mask_BT = batch.sequences.mask_BT
    np.testing.assert_allclose(logp_BT[mask_BT], batch.sampler_logp_BT[mask_BT], atol=1e-4)


def test_images_of_a_row_are_there_once():
    batch = rollout()
    packing = PackedArrays(batch.sequences, rows=1, row_tokens=8 * WIDTH, vision=VISION, pixels=pixels)
    (rows,) = packing.rows()
    patches = sum(
        6 * 4 if image == "1" else int(np.prod(grid))
        for image, grid in {one.digest: one.grid for each in PROBLEMS for one in each.images}.items()
    )
    assert int((rows.images.segment_RJQ > 0).sum()) == patches


@pytest.mark.slow
def test_equal_tokens_with_other_images_share_nothing():
    """Not a prefill, and not what the cache keeps of an earlier turn."""
    assert PROBLEMS[0].prompt_tokens == PROBLEMS[1].prompt_tokens
    kept = engine()
    first, second = (Request(n, PROBLEMS[n].prompt_tokens, images=PROBLEMS[n].images, keep=True) for n in (0, 1))
    kept.generate([first], Sampling(greedy=True), seed=0)
    (other,) = kept.generate([second], Sampling(greedy=True), seed=0)
    assert kept.prefill.reused_tokens == 3  # the text before the image
    kept.free()
    (alone,) = kept.generate([second], Sampling(greedy=True), seed=0)
    assert other.tokens == alone.tokens
    np.testing.assert_allclose(other.logps, alone.logps, atol=1e-5)


@pytest.mark.slow
def test_a_later_turn_runs_the_tower_over_new_images_alone():
    """And is sampled as where nothing was kept."""
    kept, greedy, before = engine(), Sampling(greedy=True), PROBLEMS[0]
    (first,) = kept.generate([Request(0, before.prompt_tokens, images=before.images, keep=True)], greedy, seed=0)
    tokens, images, later = (*before.prompt_tokens, *first.tokens, 5, 6), before.images, []
    for turn, more in enumerate(((), PROBLEMS[2].images[:1])):
        images += tuple(replace(image, start=len(tokens)) for image in more)
        tokens += (IMAGE,) * sum(image.tokens for image in more) + (7,)
        request = Request(0, tokens, images=images, keep=True, has_replies=True, max_tokens=4)
        ran = kept.prefill.images
        later.append((request, *kept.generate([request], greedy, seed=0)))
        assert kept.prefill.images - ran == len(more), turn
    assert kept.prefill.reused_tokens > len(before.prompt_tokens)
    for request, completion in later:
        kept.free()
        (alone,) = kept.generate([request], greedy, seed=0)
        assert completion.tokens == alone.tokens
        np.testing.assert_allclose(completion.logps, alone.logps, atol=1e-5)


def test_damaged_prompts_are_refused():
    one = PROBLEMS[0]
    made, _ = sampled()
    for tokens, images in ((one.prompt_tokens, ()), (one.prompt_tokens[:6], one.images), ((1, 2, 3), one.images)):
        with pytest.raises(Refusal):
            made.add(Request(0, tokens, images=images), Sampling(), seed=0)
