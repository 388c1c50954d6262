"""Responses that continue: the same tokens in any number of rounds, each token sampled by the policy of its round."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import gaussian

from jaxrlhf import models
from jaxrlhf.batch import Problem
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round, prompts_alone
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import Request
from jaxrlhf.workers.sampler import CompletionFeed, Sampler
from tests.engine.test_turns import MODEL, build

pytestmark = pytest.mark.usefixtures("programs")

SEED, COPIES, WIDTH, STEP = 9, 2, 64, 5
PROMPTS = ((4, 9, 1), (8,), (30, 2, 2, 7, 19), (11, 12))


def letters(tokens) -> str:
    """One letter a token."""
    return "".join(chr(ord("A") + token) for token in tokens)


@pytest.fixture(scope="module")
def engine():
    return build(slots=8, window=2, decode=letters)


@pytest.fixture
def loaded(engine):
    return partial(load, engine)


def load(engine, scale: float, version: int):
    """Other weights for each version: a policy that is surer of itself, or less."""
    engine.load(jax.tree.map(lambda leaf: jnp.asarray(scale * leaf), gaussian(MODEL)), version)
    return engine


def problems() -> list[Problem]:
    return [Problem(prompt_id=7 + n, prompt="", prompt_tokens=tokens) for n, tokens in enumerate(PROMPTS)]


def unstarted(most_kept: int = 0) -> OpenGroups:
    return unstarted_groups(problems(), most_kept=most_kept)


def unstarted_groups(asked: list[Problem], *, most_kept: int) -> OpenGroups:
    rollout = prompts_alone([one for one in asked for _ in range(COPIES)], width=WIDTH, most_kept=most_kept)
    return OpenGroups.begin(len(asked), copies=COPIES, seed=SEED, step=STEP, rollout=rollout)


def sampler_of(engine) -> Sampler:
    return Sampler(MODEL, engine, engine.mesh, engine.mesh, WIDTH, lambda *_: None, CompletionFeed())


def whole(engine, sampling: Sampling):
    return sampler_of(engine).generate(problems(), sampling, responses_per_prompt=COPIES, seed=SEED)


def in_rounds(loaded, sampling: Sampling, scales, *, complete: int = 1, due: int = 0) -> list[OpenGroups]:
    """Groups under way after each round: one more is complete in each, and all are in the last."""
    rounds, in_progress = [], unstarted()
    for version, scale in enumerate(scales):
        last = version == len(scales) - 1
        sampler = sampler_of(loaded(scale, version))
        until = Round(len(PROMPTS) if last else complete + version, len(PROMPTS), due)
        in_progress = sampler.continue_groups(problems(), in_progress, sampling, until)
        rounds.append(in_progress)
    return rounds


def test_a_request_goes_on_as_if_it_had_sampled_its_first_tokens_itself(loaded):
    engine, sampling = loaded(1.0, 0), Sampling(min_tokens=3)
    asked = [Request(number, prompt) for number, prompt in enumerate(PROMPTS)]
    expected = engine.generate(asked, sampling, seed=SEED)
    assert {len(one.tokens) for one in expected} > {16}  # some stop, and some are cut
    for sampled in (1, 2, 7):
        going = [(ask, end) for ask, end in zip(asked, expected, strict=True) if len(end.tokens) > sampled]
        rest = engine.generate(
            [Request(ask.request_id, ask.prompt_tokens + end.tokens[:sampled], sampled=sampled) for ask, end in going],
            sampling,
            seed=SEED,
        )
        assert [one.tokens for one in rest] == [end.tokens[sampled:] for _, end in going]
        assert [one.truncated for one in rest] == [end.truncated for _, end in going]
        for one, (_, end) in zip(rest, going, strict=True):
            np.testing.assert_allclose(one.logps, end.logps[sampled:], atol=1e-5)


def test_a_stop_text_reaches_back_over_tokens_that_were_sampled_before(loaded):
    engine = loaded(1.0, 0)
    request = Request(3, PROMPTS[0])
    [free] = engine.generate([request], Sampling(), seed=SEED)
    stop = letters(free.tokens[2:6])
    [expected] = engine.generate([replace(request, stop_texts=(stop,))], Sampling(), seed=SEED)
    assert expected.stop_text == stop and len(expected.tokens) < len(free.tokens)
    sampled = len(expected.tokens) - 2
    prompt = request.prompt_tokens + expected.tokens[:sampled]
    [rest] = engine.generate([Request(3, prompt, sampled=sampled, stop_texts=(stop,))], Sampling(), seed=SEED)
    assert (rest.tokens, rest.stop_text, rest.truncated) == (expected.tokens[sampled:], stop, False)


@pytest.mark.parametrize("sampled", [-1, 3, 16])
def test_a_request_cannot_have_sampled_its_whole_prompt_or_all_that_it_may(sampled, loaded):
    prompt = (1,) * (3 if sampled == 3 else 40)
    with pytest.raises(Refusal, match=f"sampled={sampled} of request 2.*at most 16"):
        loaded(1.0, 0).generate([Request(2, prompt, sampled=sampled)], Sampling(), seed=SEED)


def test_rounds_of_one_policy_draw_what_it_draws_at_once(loaded):
    sampling = Sampling()
    expected = whole(loaded(1.0, 0), sampling)
    rounds = in_rounds(loaded, sampling, [1.0] * 4)
    assert [int(one.complete_P.sum()) for one in rounds[:-1]] != [4, 4, 4]  # not all ended in the first
    np.testing.assert_array_equal(rounds[-1].rollout.sequences.token_BT, expected.sequences.token_BT)
    np.testing.assert_array_equal(rounds[-1].rollout.sequences.mask_BT, expected.sequences.mask_BT)
    np.testing.assert_array_equal(rounds[-1].rollout.truncated_B, expected.truncated_B)
    np.testing.assert_allclose(rounds[-1].rollout.sampler_logp_BT, expected.sampler_logp_BT, atol=1e-5)
    assert rounds[-1].ended_B.all() and (rounds[-1].started_P == STEP).all()


def test_each_token_is_as_likely_as_the_policy_of_its_round_says(loaded):
    scales = (1.0, 0.7, 1.2)
    *_, last = in_rounds(loaded, Sampling(), scales)
    sequences, version_BT = last.rollout.sequences, last.rollout.version_BT
    mask_BT = np.asarray(sequences.mask_BT)
    assert max(len({*row[chosen].tolist()}) for row, chosen in zip(version_BT, mask_BT, strict=True)) == 3
    assert (version_BT[~mask_BT] == -1).all()
    for version, scale in enumerate(scales):
        sampled_BT = version_BT == version
        logp_BT = teacher(scale, sequences.token_BT)
        np.testing.assert_allclose(last.rollout.sampler_logp_BT[sampled_BT], logp_BT[sampled_BT], atol=1e-5)
        others = logp_BT[mask_BT & ~sampled_BT] - last.rollout.sampler_logp_BT[mask_BT & ~sampled_BT]
        assert np.abs(others).max() > 0.1


def teacher(scale: float, token_BT) -> np.ndarray:
    """Log-probability of each token by one pass of the model over the whole sequence, `[B, T]`."""
    params = jax.tree.map(lambda leaf: jnp.asarray(scale * leaf), gaussian(MODEL))
    position_BT = np.broadcast_to(np.arange(WIDTH), token_BT.shape)
    hidden_BTD = models.hidden_states(params, MODEL, token_BT, position_BT, np.ones_like(token_BT)).hidden_RWD
    logp_BTV = jax.nn.log_softmax(hidden_BTD @ params["head"].T)
    chosen_BT = np.take_along_axis(np.asarray(logp_BTV)[:, :-1], token_BT[:, 1:, None], axis=-1)[..., 0]
    return np.pad(chosen_BT, ((0, 0), (1, 0)))


def test_a_round_ends_with_enough_groups_or_when_those_that_are_due_are_complete(loaded):
    [some, _] = in_rounds(loaded, Sampling(), [1.0, 1.0], complete=2)
    assert 2 <= some.complete_P.sum() < len(PROMPTS)
    [all_of_them, _] = in_rounds(loaded, Sampling(), [1.0, 1.0], complete=1, due=STEP)
    assert all_of_them.complete_P.all()
    [none, _] = in_rounds(loaded, Sampling(), [1.0, 1.0], complete=0)
    assert not none.ended_B.any() and none.tokens == 0


def test_what_tokens_were_sampled_among_goes_on_with_them():
    sampling = Sampling(top_k=3)
    engine = load(build(slots=8, most_kept=3), 1.0, 0)
    expected = whole(engine, sampling)
    in_progress = unstarted(most_kept=3)
    for complete in (1, 2, 4):
        in_progress = sampler_of(engine).continue_groups(problems(), in_progress, sampling, Round(complete, 4, due=0))
    np.testing.assert_array_equal(in_progress.rollout.sequences.recorded["kept"], expected.sequences.recorded["kept"])


def test_no_program_is_compiled_once_responses_go_on():
    engine = load(build(slots=8, most_kept=3), 1.0, 0)
    engine.compile_ahead([3, 48, *range(49, 63)])
    compiled = len(engine.compiled)
    long = [Problem(prompt_id=n, prompt="", prompt_tokens=(5 + n,) * (48 - n)) for n in range(4)]
    in_progress = unstarted_groups(long, most_kept=3)
    for complete in (1, 2, 3, 4):
        until = Round(complete, len(long), due=-1)
        in_progress = sampler_of(engine).continue_groups(long, in_progress, Sampling(top_k=3), until)
    assert in_progress.ended_B.all() and engine.prefill.prompts > 2 * len(long)
    assert len(engine.compiled) == compiled


@pytest.mark.parametrize("failing", ["step", "enqueue"])
def test_a_round_that_fails_leaves_the_engine_empty_and_the_groups_as_they_were(failing, loaded, monkeypatch):
    engine, before = loaded(1.0, 0), unstarted()
    copy = jax.tree.map(np.array, before)

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, failing, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler_of(engine).continue_groups(problems(), before, Sampling(), Round(4, 4, due=0))
    assert not engine.unfinished and not engine.book.active
    jax.tree.map(np.testing.assert_array_equal, before, copy)


def test_an_engine_of_another_kind_is_refused(loaded):
    class Server:
        """Answers each request whole."""

    sampler = replace(sampler_of(loaded(1.0, 0)), engine=Server())
    with pytest.raises(Refusal, match="which Server does not support"):
        sampler.continue_groups(problems(), unstarted(), Sampling(), Round(4, 4, due=0))


@pytest.mark.parametrize(("complete", "of"), [(8, 12), (7, 13), (1, 2), (12, 12)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_complete_as_many_groups_as_are_wanted_of_all(complete, of, ranks):
    parts = [(rank + 1) * of // ranks - rank * of // ranks for rank in range(ranks)]
    shares = [Round(complete, of, due=0).share(part).complete for part in parts]
    assert complete <= sum(shares) < complete + ranks
    assert all(share <= part for share, part in zip(shares, parts, strict=True))
