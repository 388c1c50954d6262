"""Draws against the definition of the distribution."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrlhf.config import Sampling
from jaxrlhf.engine.sampling import _chunk_width, sample, settings_of, uniforms

SAMPLE = jax.jit(sample)
UNIFORMS = jax.jit(uniforms)
DRAWS, VOCAB = 20_000, 20
"""Sizes that most tests share, so that little is compiled."""
LAST_UNIFORM = np.float32(1 - 2**-24)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def draw(logits_V, *, draws: int = DRAWS, sampling, uniform_B2=None, position: int = 0, stop_tokens=(), seed=0):
    """Draw from one distribution in many slots, which have at most two stop tokens."""
    logits_BV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (draws, len(logits_V)))
    position_B = jnp.full(draws, position, jnp.int32)
    if uniform_B2 is None:
        uniform_B2 = UNIFORMS(jnp.full(draws, seed, jnp.uint32), jnp.arange(draws, dtype=jnp.uint32), position_B)
    settings = settings_of(sampling if isinstance(sampling, list) else [sampling] * draws)
    stop_BE = jnp.tile(jnp.array([*stop_tokens, -1, -1][:2], jnp.int32), (draws, 1))
    token_B, logp_B, _ = SAMPLE(logits_BV, jnp.asarray(uniform_B2, jnp.float32), position_B, settings, stop_BE=stop_BE)
    return np.asarray(token_B), np.asarray(logp_B)


def chi_square(token_B: np.ndarray, probability_V: np.ndarray) -> float:
    expected_V = probability_V * len(token_B)
    observed_V = np.bincount(token_B, minlength=len(probability_V))
    assert (observed_V[expected_V == 0] == 0).all()
    kept = expected_V > 0
    return float(((observed_V - expected_V)[kept] ** 2 / expected_V[kept]).sum())


def nucleus(probability_V: np.ndarray, *, top_k: int, top_p: float, min_p: float = 0.0) -> set[int]:
    """Top k, the fewest of them that hold top_p of what they hold, and of those what is min_p of the peak; a loop."""
    order = sorted(range(len(probability_V)), key=lambda token: -probability_V[token])[: top_k or None]
    total, mass, kept = sum(probability_V[token] for token in order), 0.0, set()
    for token in order:
        kept.add(token)
        mass += probability_V[token] / total
        if mass >= top_p:
            break
    return {token for token in kept if probability_V[token] >= min_p * probability_V.max()}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_softmax(temperature):
    logits = np.random.default_rng(0).normal(0, 1.5, VOCAB)
    token_B, _ = draw(logits, sampling=Sampling(temperature=temperature), seed=5)
    assert chi_square(token_B, softmax(logits / temperature)) < 43.8  # 19 degrees of freedom, one in a thousand


def test_the_share_of_each_token_is_exact_on_a_grid_of_uniforms():
    """A prime vocabulary, one chunk per token: the first uniform decides alone."""
    logits = np.random.default_rng(1).normal(0, 1, 13)
    grid = (np.arange(100_000) + 0.5) / 100_000
    token_B, _ = draw(logits, draws=len(grid), sampling=Sampling(), uniform_B2=np.stack([grid, grid], axis=1))
    np.testing.assert_allclose(np.bincount(token_B, minlength=13) / len(grid), softmax(logits), atol=2e-5)


@pytest.mark.parametrize(
    "restriction", [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"min_tokens": 4}, {"greedy": True}]
)
def test_logp_is_that_of_the_policy_at_its_temperature(restriction):
    logits = np.random.default_rng(2).normal(0, 2, VOCAB)
    token_B, logp_B = draw(logits, sampling=Sampling(temperature=1.3, **restriction), stop_tokens=(3,))
    np.testing.assert_allclose(logp_B, np.log(softmax(logits / 1.3))[token_B], atol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.6, 0), (0, 0.97, 0), (5, 1.0, 0), (5, 0.7, 0), (1, 1.0, 0), (0, 1e-6, 0), (0, 1.0, 0.2), (7, 0.97, 0.1)],
)
def test_top_k_top_p_and_min_p_keep_the_nucleus_in_proportion(top_k, top_p, min_p):
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB)
    probability_V = softmax(logits / 0.9)
    kept = nucleus(probability_V, top_k=top_k, top_p=top_p, min_p=min_p)
    sampling = Sampling(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    token_B, _ = draw(logits, sampling=sampling, seed=1)
    assert set(token_B.tolist()) <= kept
    wanted_V = np.where([token in kept for token in range(VOCAB)], probability_V, 0.0)
    assert chi_square(token_B, wanted_V / wanted_V.sum()) < 43.8  # 19 degrees of freedom, one in a thousand


def test_slots_draw_by_their_own_settings():
    """A greedy, a narrow and a plain slot side by side."""
    logits = np.random.default_rng(5).normal(0, 1, VOCAB)
    each = [Sampling(greedy=True), Sampling(top_k=2), Sampling(), Sampling()]
    token_B, _ = draw(logits, sampling=[sampling for sampling in each for _ in range(DRAWS // 4)])
    greedy, narrow, *plain = np.split(token_B, 4)
    best = np.argsort(-logits)
    assert set(greedy) == {best[0]}
    assert set(narrow) == set(best[:2])
    assert set(np.concatenate(plain)) == set(range(VOCAB))


@pytest.mark.parametrize("vocab", [7, 60])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST_UNIFORM])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(top_k=4), Sampling(greedy=True)])
def test_minus_infinity_is_never_sampled(vocab, uniform, sampling):
    rng = np.random.default_rng(6)
    logits = np.where(rng.random(vocab) < 0.6, -np.inf, rng.normal(0, 1, vocab))
    logits[vocab // 2] = 0.3
    logits[0] = logits[-1] = -np.inf
    token_B, logp_B = draw(logits, draws=8, sampling=sampling, uniform_B2=np.full((8, 2), uniform))
    assert np.isfinite(logits[token_B]).all()
    assert np.isfinite(logp_B).all()


@pytest.mark.parametrize("greedy", [False, True])
def test_stop_tokens_wait_for_min_tokens(greedy):
    logits = np.zeros(VOCAB)
    logits[[2, 5]] = 200.0  # the other tokens' probabilities underflow beside these
    sampling = Sampling(min_tokens=3, greedy=greedy)
    early, logp_B = draw(logits, sampling=sampling, position=2, stop_tokens=(2, 5))
    assert not set(early.tolist()) & {2, 5}
    assert np.isfinite(logp_B).all()
    late, _ = draw(logits, sampling=sampling, position=3, stop_tokens=(2, 5))
    assert set(late.tolist()) <= {2, 5}


def test_uniforms_depend_on_seed_request_and_position_only():
    def one(seed, request, position):
        numbers = UNIFORMS(jnp.array([seed], jnp.uint32), jnp.array([request], jnp.uint32), jnp.array([position]))
        return tuple(np.asarray(numbers)[0].tolist())

    distinct = {one(seed, request, position) for seed in (0, 1) for request in (0, 1, 2**32 - 1) for position in (0, 9)}
    assert len(distinct) == 12
    batch = UNIFORMS(jnp.array([4, 4, 7], jnp.uint32), jnp.array([5, 6, 5], jnp.uint32), jnp.array([1, 2, 1]))
    for row, arguments in enumerate([(4, 5, 1), (4, 6, 2), (7, 5, 1)]):
        assert tuple(np.asarray(batch)[row].tolist()) == one(*arguments)


def test_uniforms_are_uniform_and_independent():
    count = 20_000
    number_B2 = np.asarray(
        UNIFORMS(jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.int32))
    )
    assert number_B2.min() >= 0 and number_B2.max() < 1
    histogram, _, _ = np.histogram2d(number_B2[:, 0], number_B2[:, 1], bins=5, range=[[0, 1], [0, 1]])
    assert ((histogram - count / 25) ** 2 / (count / 25)).sum() < 51.2  # 24 degrees of freedom, one in a thousand


@pytest.mark.parametrize("vocab", [151936, 152064, 128256, 201088, 32000, 4160])
def test_devices_that_split_a_vocabulary_have_whole_chunks_of_it(vocab: int) -> None:
    width = _chunk_width(vocab)
    assert all(vocab // devices % width == 0 for devices in (2, 8, 64) if vocab % devices == 0)
    assert max(width, vocab // width) < vocab / 16


@pytest.mark.parametrize(("vocab", "devices"), [(151936, 8), (4160, 2)])
def test_devices_that_split_a_vocabulary_exchange_sums_and_a_chunk_of_it(vocab: int, devices: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tensor",))

    def abstract(shape, dtype, *split):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split)))

    logits, uniforms = abstract((8, vocab), jnp.float32, None, "tensor"), abstract((8, 2), jnp.float32)
    settings = jax.tree.map(lambda x: abstract(x.shape, x.dtype), settings_of([Sampling(top_k=5, top_p=0.9)] * 8))
    lowered = SAMPLE.lower(logits, uniforms, abstract((8,), jnp.int32), settings, stop_BE=abstract((8, 1), jnp.int32))
    program = lowered.compile().as_text()
    moved = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)", program)
    entries = [np.prod([int(size) for size in shape.split(",") if size]) for shape in moved]
    assert entries and max(entries) < 8 * vocab / 16  # sums, or one chunk, of each slot; never its logits
