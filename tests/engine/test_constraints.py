"""Responses that are constrained token by token, beside responses that are not."""

import numpy as np
import pytest

from jaxrlhf.config import Sampling
from jaxrlhf.engine import EngineService, Request
from tests.engine.test_turns import SEED, build, prompts

pytestmark = pytest.mark.usefixtures("programs")

VOCAB = 32
SAMPLINGS = [Sampling(), Sampling(greedy=True), Sampling(top_k=2), Sampling(top_p=0.5, temperature=1.3)]


class Alternating:
    """Even tokens in even places, odd tokens in odd places, then the stop token."""

    def __init__(self, most=9, stop=3):
        self.taken, self._most, self._stop = [], most, stop

    def _tokens(self):
        if len(self.taken) >= self._most:
            return {self._stop}
        return {token for token in range(4, VOCAB) if token % 2 == len(self.taken) % 2}

    def allowed(self):
        bits = np.zeros(1, np.uint32)
        for token in self._tokens():
            bits[token // 32] |= np.uint32(1 << (token % 32))
        return bits

    def take(self, token):
        assert token in self._tokens()
        self.taken.append(token)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "greedy", "top_k", "top_p"])
@pytest.mark.parametrize("most_kept", [0, 4], ids=["", "kept"])
def test_a_constrained_response_obeys_beside_others(sampling, most_kept):
    engine = build(most_kept=most_kept)
    free = [Request(number, prompt, max_tokens=12) for number, prompt in enumerate(prompts())]
    alone = engine.generate(free, sampling, seed=SEED)
    asked = [
        Request(10 + number, prompt, max_tokens=12, constraint=Alternating()) for number, prompt in enumerate(prompts())
    ]
    mixed = engine.generate([*free, *asked], sampling, seed=SEED)
    assert mixed[:4] == alone
    for request, completion in zip(asked, mixed[4:], strict=True):
        assert [token % 2 for token in completion.tokens[:9]] == [place % 2 for place in range(9)]
        assert completion.tokens[9:] == (3,) and not completion.truncated
        assert request.constraint.taken == list(completion.tokens[:-1])
        if "kept" in completion.recorded and sampling.top_k:
            for place, kept_K in enumerate(completion.recorded["kept"][1][:9]):
                assert {token % 2 for token in kept_K[kept_K >= 0].tolist()} == {place % 2}
    again = engine.generate(free, sampling, seed=SEED)
    assert again == alone, "no constraint outlives its response"


def test_others_sample_whole_windows_again_once_a_constrained_response_has_ended(monkeypatch):
    """Its row is left at once, as two rows are enough for the others."""
    monkeypatch.setattr("jaxrlhf.engine.buckets.FEWEST_SLOTS", 2)
    engine, ran = build(), []
    run = engine.compiled.run
    monkeypatch.setattr(
        engine.compiled, "run", lambda sizes, *rest, **how: ran.append(sizes) or run(sizes, *rest, **how)
    )
    free = [Request(number, prompts()[number], max_tokens=16, stop_tokens=()) for number in range(2)]
    engine.generate([*free, Request(2, prompts()[2], constraint=Alternating(most=2))], Sampling(), seed=SEED)
    constrained = ["constrained" in sizes for sizes in ran if sizes[0] == "decode"]
    assert constrained == sorted(constrained, reverse=True) and constrained[0] and not constrained[-1]


def test_log_probabilities_are_those_of_the_policy():
    """A constraint narrows the choice as `top_p` does, and a trainer knows the temperature alone."""
    engine = build()
    request = Request(0, prompts()[0], max_tokens=12, constraint=Alternating())
    done = engine.generate([request], Sampling(temperature=1.1), seed=SEED)[0]
    [scores] = engine.score([(*prompts()[0], *done.tokens)], temperature=1.1)
    np.testing.assert_allclose(done.logps, scores.logp_T[-len(done.tokens) :], atol=1e-4)


def test_a_constrained_response_can_be_cancelled_and_its_slot_taken():
    engine = build()
    engine.free()
    with EngineService(engine) as service:
        gone = [
            service.submit(
                Request(number, prompt, max_tokens=16, constraint=Alternating(99)), Sampling(greedy=True), seed=SEED
            )
            for number, prompt in enumerate(prompts())
        ]
        for future in gone:
            future.cancel()
        done = service.submit(Request(9, prompts()[1], max_tokens=12), Sampling(greedy=True), seed=SEED).result(60)
    assert done == engine.generate([Request(9, prompts()[1], max_tokens=12)], Sampling(greedy=True), seed=SEED)[0]


def test_windows_that_are_dispatched_ahead_are_constrained_too():
    engine = build(window=3)
    engine._dispatch_ahead = True
    request = Request(0, prompts()[0], max_tokens=12, constraint=Alternating())
    done = engine.generate([request], Sampling(), seed=SEED)[0]
    assert [token % 2 for token in done.tokens[:9]] == [place % 2 for place in range(9)] and done.tokens[9:] == (3,)
