"""Episodes that continue across updates: one policy samples each reply, and no update waits for slow tools."""

import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrlhf import models
from jaxrlhf.batch import Diverged
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round
from jaxrlhf.config import Sampling
from jaxrlhf.environments.pool import EnvironmentPool
from tests.agent_loop import test_agent_loop
from tests.agent_loop.test_agent_loop import MODEL, PROMPT, RESPONSE, TALKS, TURNS, problems, run

pytestmark = pytest.mark.usefixtures("programs")

engine, loop, weights = test_agent_loop.engine, test_agent_loop.loop, test_agent_loop.weights
COPIES = 2
SLOW_S = 0.1
"""Pause of every second problem's environment before each of its answers."""


@pytest.fixture
def agents(loop):
    """Loop whose open episodes belong to one test."""
    made = replace(loop)
    yield made
    if made._open is not None:
        made._open.close()


@pytest.fixture
def new_weights(weights):
    return jax.tree.map(lambda leaf: np.float32(1.5) * leaf, weights)


def groups(count, *, ended=(), started=0):
    ended_B = np.repeat([number in ended for number in range(count)], COPIES)
    return OpenGroups(np.full(count, 11), np.full(count, started), ended_B)


def resume(agents, engine, asked, state, *, complete=None, due=-1):
    until = Round(len(asked) if complete is None else complete, len(asked), due)
    return agents.resume_groups(engine, asked, state, Sampling(), until, width=PROMPT + RESPONSE)


def load(engine, weights, version):
    laid_out = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), weights, engine.weights.params)
    engine.load(laid_out, version)


def prompts(batch):
    return [*dict.fromkeys(batch.sequences.prompt_id_B.tolist())]


def logps(weights, sequences):
    """`[B, T - 1]` log-probability of each token but the first."""
    position_BT = np.broadcast_to(np.arange(PROMPT + RESPONSE), sequences.token_BT.shape)
    inside_BT = (position_BT < sequences.length_B[:, None]).astype(np.int32)
    hidden = models.hidden_states(weights, MODEL, sequences.token_BT, position_BT, inside_BT).hidden_RWD
    logits_BTV = models.logits(weights, MODEL, hidden)
    logp_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))[:, :-1]
    return np.take_along_axis(logp_BTV, sequences.token_BT[:, 1:, None], axis=2)[..., 0]


@pytest.mark.slow
def test_slow_episodes_continue_under_the_next_policy(agents, engine, weights, new_weights):
    """Each token has the log-probability of the policy that sampled it, and all tokens of a turn have one policy."""
    asked = problems(4, pause_s=SLOW_S)
    whole = run(agents, engine, asked)
    first = resume(agents, engine, asked, groups(4), complete=2)
    assert prompts(first) == [0, 2]  # the other environments pause
    rows = np.isin(whole.sequences.prompt_id_B, (0, 2))
    np.testing.assert_array_equal(first.sequences.token_BT, whole.sequences.token_BT[rows])
    load(engine, new_weights, 4)
    try:
        rest = resume(agents, engine, asked, groups(4, ended=(0, 2)))
    finally:
        load(engine, weights, 3)
    assert prompts(rest) == [1, 3] and {record.stop for record in rest.episodes.records} == {"done"}
    sequences, version_BT = rest.sequences, rest.version_BT
    assert {*version_BT[sequences.mask_BT].tolist()} == {3, 4}
    said = {version: logps(given, sequences) for version, given in ((3, weights), (4, new_weights))}
    for version, logp_BT in said.items():
        sampled_BT = (sequences.mask_BT & (version_BT == version))[:, 1:]
        np.testing.assert_allclose(logp_BT[sampled_BT], rest.sampler_logp_BT[:, 1:][sampled_BT], atol=1e-5)
    turn_BT = rest.episodes.turn_BT
    for row, record in enumerate(rest.episodes.records):
        by_turn = [{*version_BT[row, turn_BT[row] == turn].tolist()} for turn in range(TURNS)]
        assert all(len(versions) == 1 for versions in by_turn)
        assert [min(versions) for versions in by_turn] == sorted(min(versions) for versions in by_turn)
        assert len(record.turns) == TURNS


def test_due_groups_are_completed(agents, engine):
    asked = problems(2, pause_s=SLOW_S)
    state = replace(groups(2), started_P=np.array([5, 4]))
    assert prompts(resume(agents, engine, asked, state, complete=1, due=4)) == [0, 1]


@pytest.mark.slow
def test_a_group_missing_in_a_call_is_dropped_and_later_starts_again(agents, engine):
    asked = problems(2, pause_s=SLOW_S)
    resume(agents, engine, asked, groups(2), complete=1)
    later = problems(1, first=8)
    assert prompts(resume(agents, engine, later, groups(1, started=1))) == [8]
    again = resume(agents, engine, asked[1:], groups(1))
    np.testing.assert_array_equal(again.sequences.token_BT, run(agents, engine, asked[1:]).sequences.token_BT)


def test_evaluation_may_run_the_same_episodes_between_two_calls(agents, engine):
    """Evaluation problems have the same numbers as training problems, and run on the same engine and environments."""
    asked = problems(2, pause_s=SLOW_S)
    resume(agents, engine, asked, groups(2), complete=1)
    between = run(agents, engine, asked)
    rest = resume(agents, engine, asked, groups(2, ended=(0,)))
    assert {record.stop for batch in (between, rest) for record in batch.episodes.records} == {"done"}
    rows = between.sequences.prompt_id_B == 1
    np.testing.assert_array_equal(rest.sequences.token_BT, between.sequences.token_BT[rows])


@pytest.mark.slow
def test_time_limits_pause_between_two_calls(agents, engine):
    """Limits of open episodes, and of an episode that starts because another one ends between the calls."""
    settings = replace(TALKS, episode_s=3.0, in_flight=2 * COPIES)
    records = {"turns": 1}, {"turns": 1, "pause_s": 0.4}, {"turns": TURNS, "pause_s": SLOW_S}, {"turns": TURNS}
    asked = [replace(one, record=record) for one, record in zip(problems(4), records, strict=True)]
    with EnvironmentPool((settings,)) as pool:
        timed = replace(agents, environment=settings, pool=pool)
        try:
            assert prompts(resume(timed, engine, asked, groups(4), complete=1)) == [0]
            time.sleep(4.0)
            rest = resume(timed, engine, asked, groups(4, ended=(0,)))
        finally:
            timed._open.close()
    assert {record.stop for record in rest.episodes.records} == {"done"}
    assert max(turn.policy_s for record in rest.episodes.records for turn in record.turns) < 2.0


def test_an_episode_may_get_its_final_reward_between_two_calls(agents, engine):
    """Its time limit is paused."""
    settings = replace(TALKS, factory="talking_environments:PaysLate", max_turns=1, episode_s=60.0)
    asked = problems(2, pause_s=1.0)
    with EnvironmentPool((settings,)) as pool:
        timed = replace(agents, environment=settings, pool=pool)
        try:
            assert prompts(resume(timed, engine, asked, groups(2), complete=1)) == [0]
            rest = resume(timed, engine, asked, groups(2, ended=(0,)))
        finally:
            timed._open.close()
    assert {record.stop for record in rest.episodes.records} == {"turns"}
    assert {
        round(record.environment_reward - sum(turn.reward for turn in record.turns)) for record in rest.episodes.records
    } == {7}


def test_errors_of_the_engine_are_raised_and_the_next_call_starts_again(agents, engine, monkeypatch):
    asked = problems(2)

    def diverges():
        raise Diverged("logits are not finite")

    monkeypatch.setattr(engine, "step", diverges)
    with pytest.raises(Diverged, match="not finite"):
        resume(agents, engine, asked, groups(2))
    monkeypatch.undo()
    assert prompts(resume(agents, engine, asked, groups(2))) == [0, 1]
