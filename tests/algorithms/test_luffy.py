"""LUFFY: a step on made-up responses and solutions against the paper's objective, and what is refused."""

import json
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_steps import Made, done, rollout_of

from jaxrlhf.algos import TokenOutput
from jaxrlhf.batch import Problem
from jaxrlhf.config import (
    Arithmetic,
    Config,
    FromScratch,
    KLInLoss,
    KLInReward,
    PolicyLoss,
    PromptFile,
    Rollout,
    Tools,
    TruncatedImportance,
    checked,
    load_module,
)
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.trainer.phase import load_data

luffy = load_module("luffy")
LUFFY, guided_objective = luffy.LUFFY, luffy.guided_objective
WIDTH, CLIP, GAMMA = 6, 0.2, 0.1
SAMPLED = np.isin(np.arange(WIDTH), [1, 2, 3, 4]) & (np.arange(WIDTH) < np.array([4, 3, 2, 5])[:, None])
SOLUTIONS = ((7, 8, 9, 3), (7, 3))
SCORES, SOLUTION_SCORES = (0.0, 1.0, 0.0, 0.0), (1.0, 0.5)
ROLLOUT = Rollout(prompts_per_step=2, responses_per_prompt=3, max_prompt_tokens=2, max_response_tokens=4)


def config(algorithm=None, **changes) -> Config:
    settings = {"data": Arithmetic(), "rollout": ROLLOUT, **changes}
    given = LUFFY(responses_per_update=6) if algorithm is None else algorithm
    return checked(Config(name="luffy", algorithm=given, steps=1, model=FromScratch(), **settings))


def problems(solutions=SOLUTIONS) -> list[Problem]:
    return [Problem(n, "", (100 + n,), solution_tokens=own) for n, own in enumerate(solutions)]


class Actor(Made):
    """An actor whose old policy is sure of each token by a half, as is its sampler; and a reference."""

    def compute_log_prob(self, rollout):
        mask_BT = rollout.result().sequences.mask_BT
        return done(np.where(mask_BT, math.log(0.5), np.nan).astype(np.float32))

    compute_ref_log_prob = compute_log_prob


def step(settings: Config, *, solution_scores=SOLUTION_SCORES, given=None):
    def generate(problems, copies):
        rollout = rollout_of(SAMPLED, np.repeat([one.prompt_id for one in problems], copies))
        return replace(rollout, sampler_logp_BT=np.where(SAMPLED, math.log(0.5), 0).astype(np.float32))

    made = Actor(generate, lambda rollout: SCORES if len(rollout.truncated_B) == 4 else solution_scores)
    work = StepInput(settings, problems() if given is None else given, 0, settings.algorithm.initial_state())
    roles = SimpleNamespace(actor=made, reward=made, reference=made)
    return luffy.learn(roles, work, luffy.collect(roles, work)), made


@pytest.mark.parametrize(
    "algorithm",
    [
        LUFFY(),
        LUFFY(old_logp="trainer", correction=TruncatedImportance()),
        LUFFY(old_logp="bypass"),
        LUFFY(kl=KLInLoss()),
    ],
    ids=["sampler", "trainer", "bypass", "kl"],
)
def test_a_step_has_the_objective_of_the_paper(algorithm):
    """1/Z (sum over solutions of f(pi) A + sum over responses of min(r A, clip(r) A)), A over the whole group."""
    result, made = step(config(replace(algorithm, responses_per_update=6, policy=PolicyLoss(dual_clip=None))))
    assert [copies for _, _, copies in made.asked] == [2]
    [batch] = made.minibatches
    rng = np.random.default_rng(0)
    chance = rng.uniform(0.02, 0.98, batch.weight_BT.shape)

    groups = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.5]]
    gain = [[(x - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6) for x in own] for own in groups]
    rows = []  # of the minibatch: (places of the tokens, advantage, a solution or not)
    for row, token in enumerate(batch.sequences.token_BT[:, 0].tolist()):
        solution = token >= 100
        prompt = token - 100 if solution else token // 2
        places = 1 + np.arange(len(SOLUTIONS[prompt])) if solution else np.flatnonzero(SAMPLED[token])
        rows.append((row, places, gain[prompt][2 if solution else token % 2], solution))
    total = sum(len(places) for _, places, _, _ in rows)

    itself = "sampler_logp" in batch.fields  # the old policy is the one that is trained

    def objective(chance):
        found = 0.0
        for row, places, advantage, solution in rows:
            for place in places:
                x = chance[row, place]
                if solution:
                    found += x / (x + GAMMA) * advantage
                elif not itself:
                    ratio = x / 0.5
                    found += min(ratio * advantage, min(max(ratio, 1 - CLIP), 1 + CLIP) * advantage)
        return found / total

    mask = np.asarray(batch.sequences.mask_BT)
    settings = replace(algorithm, kl=None, policy=PolicyLoss(dual_clip=None))  # of the policy alone
    fields = {name: value for name, value in batch.fields.items() if name not in ("ref_logp", "kl_weight")}
    assert ("kl_weight" in batch.fields) == (algorithm.kl is not None)

    def ours(logp):
        terms = guided_objective(TokenOutput(logp), mask, batch.weight_BT, fields, settings)
        return terms.loss.sum(), terms.metrics

    logp = np.where(mask, np.log(chance), np.nan).astype(np.float32)
    (loss, metrics), slope = jax.jit(jax.value_and_grad(ours, has_aux=True))(logp)
    wanted = np.zeros(mask.shape)
    for row, places, advantage, solution in rows:
        for place in places:
            if itself and not solution:  # the gradient of the ratio where it is 1
                wanted[row, place] = -advantage / total
                continue
            moved = [chance.copy(), chance.copy()]
            moved[0][row, place] *= math.exp(1e-6)
            moved[1][row, place] *= math.exp(-1e-6)
            wanted[row, place] = -(objective(moved[0]) - objective(moved[1])) / 2e-6
    np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-6)
    sampled = sum(advantage * len(places) for _, places, advantage, solution in rows if not solution)
    np.testing.assert_allclose(loss, -objective(chance) - itself * sampled / total, rtol=1e-5, atol=1e-6)

    solved = [chance[row, place] for row, places, _, solution in rows if solution for place in places]
    assert metrics["luffy/solution_probability"].sum() / total == pytest.approx(statistics.fmean(solved), rel=1e-5)
    ratio = metrics["policy/ratio_mean"].sum() / total
    sampled = [chance[row, place] / 0.5 for row, places, _, solution in rows if not solution for place in places]
    assert ratio == pytest.approx(1 if itself else statistics.fmean(sampled), rel=1e-5)

    assert result.metrics["luffy/solution_score"] == 0.75
    assert result.metrics["score/mean"] == 0.25, "of sampled responses"
    assert result.metrics["tokens/generated"] == SAMPLED.sum()
    assert result.metrics.get("sampler/logp_gap_max", 0) == 0
    assert result.metrics.get("correction/weight_mean", 1) == 1


def test_several_solutions_are_in_a_group_as_many_as_are_asked_for(refused):
    """A group of 3 has two solutions and one sampled response; a third solution is left out, a single one refused."""
    made = [
        Problem(0, "", (100,), solution_tokens=(7, 8, 3), further_solutions=((9, 3), (5, 5, 5, 3))),
        Problem(1, "", (101,), solution_tokens=(4, 3), further_solutions=((6, 6, 3),)),
    ]
    sampled_mask = np.isin(np.arange(WIDTH), [1, 2]) & np.ones((2, 1), bool)

    def generate(problems, copies):
        assert copies == 1
        return replace(rollout_of(sampled_mask, [0, 1]), sampler_logp_BT=np.zeros((2, WIDTH), np.float32))

    scores = iter([(0.0, 1.0), (1.0, 0.5, 0.0, 1.0)])
    settings = config(LUFFY(responses_per_update=6, solutions=2))
    roles = Actor(generate, lambda rollout: next(scores))
    work = StepInput(settings, made, 0, settings.algorithm.initial_state())
    every = SimpleNamespace(actor=roles, reward=roles, reference=roles)
    luffy.learn(every, work, luffy.collect(every, work))
    [batch] = roles.minibatches
    token, mask = np.asarray(batch.sequences.token_BT), np.asarray(batch.sequences.mask_BT)
    advantage, off = batch.fields["advantage"], batch.fields["off_policy"]
    found = {
        tuple(row[mine].tolist()): value[mine][0]
        for row, mine, value, solution in zip(token, mask, advantage, off, strict=True)
        if solution.any()
    }
    groups = {(0.0, 1.0, 0.5): ((7, 8, 3), (9, 3)), (1.0, 0.0, 1.0): ((4, 3), (6, 6, 3))}
    for group, solutions in groups.items():
        for number, one in enumerate(solutions, start=1):
            wanted = (group[number] - statistics.fmean(group)) / statistics.stdev(group)
            assert found.pop(one) == pytest.approx(wanted, rel=1e-4)
    assert not found
    with refused():
        luffy.solutions_of(made, settings, each=3)
    with refused():
        config(LUFFY(responses_per_update=6, solutions=3))


def test_a_list_of_texts_is_several_solutions(tmp_path):
    records = [
        {"prompt": "1", "answer": "1", "solution": ["11", "222"]},
        {"prompt": "2", "answer": "1", "solution": ["1", "2222"]},  # whose second is too long
        {"prompt": "3", "answer": "1", "solution": "3"},
        {"prompt": "4", "answer": "1", "solution": ["44"]},
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = embedded_tokenizer()
    settings = config(
        data=PromptFile(str(file), solution_key="solution"), rollout=replace(ROLLOUT, max_prompt_tokens=16)
    )
    table = load_data(settings, tokenizer).train.problems
    assert [one.prompt_id for one in table] == [0, 2, 3]
    said = [[tokenizer.decode(ids) for ids in (one.solution_tokens, *one.further_solutions)] for one in table]
    assert said == [["11<|eos|>", "222<|eos|>"], ["3<|eos|>"], ["44<|eos|>"]]
    records[0]["solution"][1] = "22"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(record) + "\n" for record in records))
    again = load_data(replace(settings, data=PromptFile(str(other), solution_key="solution")), tokenizer)
    assert again.train.problems.fingerprint != table.fingerprint


def test_an_unscorable_solution_is_in_no_baseline_and_trains_nothing():
    result, made = step(config(), solution_scores=(math.nan, 0.5))
    [batch] = made.minibatches
    [row] = np.flatnonzero(batch.sequences.token_BT[:, 0] == 100)
    assert not batch.weight_BT[row].any() and not batch.fields["off_policy"][row].any()
    first = batch.fields["advantage"][batch.sequences.token_BT[:, 0] < 2]
    np.testing.assert_allclose(sorted({*np.round(first[first != 0], 4)}), [-0.7071, 0.7071], atol=1e-4)
    assert result.metrics["luffy/solution_score"] == 0.5


def test_records_whose_solution_is_longer_than_a_response_are_left_out(tmp_path):
    records = [{"prompt": str(n), "answer": "1", "solution": "1" * length} for n, length in enumerate((3, 4, 1))]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    rollout = replace(ROLLOUT, max_prompt_tokens=16)  # a response has 4 tokens, and its last one is EOS
    settings = config(data=PromptFile(str(file), solution_key="solution"), rollout=rollout)
    assert [one.prompt_id for one in load_data(settings, embedded_tokenizer()).train.problems] == [0, 2]


def test_what_fits_no_solution_is_refused(refused):
    for changes in [
        {"algorithm": LUFFY(responses_per_update=6), "data": PromptFile("train.jsonl")},
        {"environment": Tools(functions=("tools.py:calculator",))},
        {"rollout": replace(ROLLOUT, staleness=1, over_provision=2.0)},
        {"rollout": replace(ROLLOUT, responses_per_prompt=1), "algorithm": LUFFY(responses_per_update=2)},
    ]:
        with refused():
            config(**changes)
    with refused():
        LUFFY(kl=KLInReward())
    with refused():
        step(config(), given=[*problems()[:1], replace(problems()[1], solution_tokens=(), source="sums")])
