"""Agent programs over HTTP: what the policy drew for them is trained, each call once, and failures are theirs alone."""

from dataclasses import replace

import numpy as np
import pytest
from test_agent_loop import PROMPT, RESPONSE, TOKENIZER, engine, run, weights  # noqa: F401 - two are fixtures

from jaxrlhf.agent_loop import AgentLoop
from jaxrlhf.batch import Problem
from jaxrlhf.config import Agent
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.environments.pool import EnvironmentPool

pytestmark = pytest.mark.slow
PROBLEMS = [Problem(number, "", (5,), record={"number": number}) for number in range(3)]


def played(engine, program, **settings):  # noqa: F811 - the fixture's value
    agent = Agent(program=f"talking_agents:{program}", **settings)
    with EnvironmentPool((agent,)) as pool:
        return run(AgentLoop(agent, ChatFormat(TOKENIZER), pool, PROMPT, RESPONSE), engine, PROBLEMS, copies=2)


def test_calls_that_extend_each_other_are_one_sequence(engine):  # noqa: F811
    batch = played(engine, "asks_twice")
    rollout, episodes = batch.rollout, batch.rollout.episodes
    assert [record.stop for record in batch.record_E] == ["done"] * 6
    assert episodes.episode_B.tolist() == [number for number in range(6) for _ in range(2)]
    turns = [sorted(set(row_T[row_T >= 0].tolist())) for row_T in episodes.turn_BT]
    assert sorted(map(tuple, turns[:2])) == [(0, 1), (2,)] or sorted(map(tuple, turns[:2])) == [(0,), (1, 2)]
    assert [record.environment_reward for record in batch.record_E] == [0, 0, 0.1, 0.1, 0.2, 0.2]
    assert np.array_equal(rollout.sequences.mask_BT, episodes.turn_BT >= 0)
    paid = [float(episodes.reward_BT[2 * number : 2 * number + 2].sum()) for number in range(6)]
    np.testing.assert_allclose(paid, [0, 0, 0.1, 0.1, 0.2, 0.2], rtol=1e-6)
    again = played(engine, "asks_twice")
    np.testing.assert_array_equal(again.rollout.sequences.token_BT, rollout.sequences.token_BT)


@pytest.mark.parametrize(
    ("program", "settings", "stop", "paid"),
    [
        ("never_asks", {}, "done", 0.5),
        ("raises", {}, "environment_error", None),
        ("hangs", {"episode_s": 1.0}, "episode_timeout", None),
    ],
)
def test_programs_that_ask_nothing_end_by_themselves(engine, program, settings, stop, paid):  # noqa: F811
    batch = played(engine, program, **settings)
    assert {(record.stop, record.environment_reward) for record in batch.record_E} == {(stop, paid)}
    assert not batch.rollout.sequences.mask_BT.any()
    assert bool(batch.record_E[0].failure) == (stop != "done")


def test_limits_of_calls_are_told_to_the_program(engine):  # noqa: F811
    batch = played(engine, "asks_twice", max_turns=1)
    assert {record.stop for record in batch.record_E} == {"environment_error"}
    assert all(record.metrics == {"refused_calls": 1.0} for record in batch.record_E)
    assert replace(batch.record_E[0]).failure
