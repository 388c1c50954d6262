"""Nash-MD: the mixture that opponents are sampled from, a step on made-up responses, and what is refused."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from made_steps import Made, done, problem, rollout_of
from tiny_models import logits

from jaxrlhf.config import (
    Arithmetic,
    Config,
    FromScratch,
    KLInLoss,
    Layout,
    Lora,
    PolicyLoss,
    Rollout,
    Sampling,
    Tools,
    Training,
    TruncatedImportance,
    checked,
    load_module,
)
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.engine import Engine
from tests.engine.test_generate import LONGEST_PROMPT, LONGEST_RESPONSE, MODEL, STOP, problems, weights

pytestmark = pytest.mark.usefixtures("programs")

nash_md = load_module("nash_md")
NashMD, GeometricMixture = nash_md.NashMD, nash_md.GeometricMixture
SHARE, TEMPERATURE = 0.3, 0.8


def own_logits(params, model, token_T) -> np.ndarray:
    token_RW = np.zeros((1, LONGEST_PROMPT + LONGEST_RESPONSE), np.int32)  # what comes later is seen by nobody
    token_RW[0, : len(token_T)] = token_T
    return np.asarray(logits(params, model, token_RW)[0, : len(token_T)], np.float64)


@pytest.mark.slow
def test_the_engine_draws_from_the_geometric_mixture_of_two_policies():
    model = replace(MODEL, logits_scaling=1.7)
    policy, reference = weights(3), weights(4)
    mixture = GeometricMixture.of(model, SHARE)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    sizes = {"slots": 3, "max_prompt_tokens": LONGEST_PROMPT, "max_response_tokens": LONGEST_RESPONSE}
    engine = Engine(mixture, mesh, stop_tokens=STOP, decode_tokens_per_dispatch=4, **sizes)
    engine.load(mixture.joined(policy, reference), version=7)
    requests = problems(5)
    sampled = engine.generate(requests, Sampling(temperature=TEMPERATURE), seed=1)
    greedy = engine.generate(requests, Sampling(greedy=True), seed=1)
    moved = 0
    for request, response, likeliest in zip(requests, sampled, greedy, strict=True):
        for completion in (response, likeliest):
            tokens, start = (*request.prompt, *completion.tokens), len(request.prompt)
            each = [own_logits(params, model, tokens)[start - 1 : -1] for params in (policy, reference)]
            mixed = (1 - SHARE) * each[0] + SHARE * each[1]
            if completion is likeliest:
                assert mixed.argmax(axis=1).tolist() == list(completion.tokens)
                moved += sum(own.argmax(axis=1).tolist() != list(completion.tokens) for own in each)
                continue
            scaled = mixed / TEMPERATURE
            logp = scaled - np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1, keepdims=True))
            logp -= scaled.max(1, keepdims=True)
            wanted = logp[np.arange(len(completion.tokens)), completion.tokens]
            np.testing.assert_allclose(completion.logps, wanted, atol=2e-5)
    assert moved > 2, "the mixture says the same as one of the two"


def test_models_whose_mixture_is_not_of_their_hidden_states_are_refused(refused):
    for model in (replace(MODEL, final_logit_softcapping=30.0), GeometricMixture.of(MODEL, SHARE)):
        with refused():
            GeometricMixture.of(model, SHARE)


# A step.

MASK = np.arange(5) < np.array([3, 2, 4, 1])[:, None]
SCORES, THEIRS = (1.0, -0.5, 0.0, 2.0), (0.25, math.nan)


def config(algorithm=None, **changes) -> Config:
    settings = {"data": Arithmetic(), "rollout": Rollout(2, 2, max_prompt_tokens=2, max_response_tokens=3), **changes}
    given = NashMD(responses_per_update=4) if algorithm is None else algorithm
    return checked(Config(name="nash", algorithm=given, steps=1, model=FromScratch(), **settings))


class Actor(Made):
    """An actor, its opponents and its reference; the log-ratio of a token is 0.2 in each response's first."""

    def generate_opponents(self, problems, sampling, *, share, seed):
        self.seeds, self.share = seed, share
        return done(rollout_of(MASK[[0, 2]], [one.prompt_id for one in problems]))

    def compute_ref_log_prob(self, rollout):
        mask_BT = rollout.result().sequences.mask_BT
        return done(np.where(mask_BT, -1.0 - 0.2 * (np.arange(5) == 0), np.nan).astype(np.float32))


@pytest.mark.parametrize("how", ["bradley-terry", "higher"])
def test_a_step_follows_the_chance_to_be_preferred_less_the_log_ratio(how):
    def generate(problems, copies):
        return rollout_of(MASK, np.repeat([one.prompt_id for one in problems], copies))

    made = Actor(generate, lambda rollout: SCORES if len(rollout.truncated_B) == 4 else THEIRS)
    settings = config(NashMD(responses_per_update=4, beta=0.4, preference=how))
    work = StepInput(settings, [problem(0), problem(1)], 0, settings.algorithm.initial_state())
    roles = SimpleNamespace(actor=made, reward=made, reference=made)
    result = nash_md.learn(roles, work, nash_md.collect(roles, work))
    assert made.share == 0.125
    assert made.seeds != work.seed, "opponents would be sampled by the numbers of the policy's responses"
    ahead = [1.0 - 0.25, -0.5 - 0.25]
    chance = [1 / (1 + math.exp(-x)) for x in ahead] if how == "bradley-terry" else [1.0, 0.0]
    # The opponent of the second problem has no score, so its responses teach nothing.
    wanted = np.array([*(own - 0.5 - 0.4 * 0.2 for own in chance), 0.0, 0.0])
    np.testing.assert_allclose(made.rows("advantage"), np.where(MASK, wanted[:, None], 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.rows("weight"), MASK / 4, rtol=1e-6)  # summed over tokens, mean over responses
    assert result.metrics["nash/preferred"] == pytest.approx(np.mean(chance))
    assert result.metrics["score/opponents"] == 0.25 and result.metrics["score/mean"] == 0.625
    assert result.metrics["tokens/generated"] == MASK.sum() + MASK[[0, 2]].sum()


def test_what_no_mixture_can_be_sampled_for_is_refused(refused):
    for settings in ({"kl": KLInLoss()}, {"policy": PolicyLoss()}):
        with refused():
            NashMD(**settings)
    quantized = NashMD(responses_per_update=4, correction=TruncatedImportance())
    for changes in [
        {"environment": Tools(functions=("tools.py:calculator",))},
        {"actor": Training(lora=Lora())},
        {"actor": Training(layout=Layout(generation_stage=2)), "rollout": Rollout(2, 2, staleness=1)},
        {"rollout": Rollout(2, 2, quantize="int8"), "algorithm": quantized},
        {"placement": "auto"},
    ]:
        with refused():
            config(**changes)
