"""Agent programs over HTTP: each sampled token is trained once, and a failing program fails only its episode."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrlhf.agent_loop import AgentLoop
from jaxrlhf.batch import Problem
from jaxrlhf.config import Agent
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.dataflows.batches.episodes import episode_metrics
from jaxrlhf.environments.pool import EnvironmentPool
from tests.agent_loop.test_agent_loop import PROMPT, RESPONSE, TOKENIZER, engine, run, weights  # noqa: F401 - two are fixtures
from tests.agent_loop.test_open import groups, load, prompts, resume

pytestmark = pytest.mark.slow
PROBLEMS = [Problem(number, "", (5,), record={"number": number}) for number in range(3)]


def played(engine, program, **settings):  # noqa: F811 - the fixture's value
    agent = Agent(program=f"talking_agents:{program}", **settings)
    with EnvironmentPool((agent,)) as pool:
        return run(AgentLoop(agent, ChatFormat(TOKENIZER), pool, PROMPT, RESPONSE), engine, PROBLEMS, copies=2)


def test_requests_that_extend_each_other_are_one_sequence(engine):  # noqa: F811
    batch = played(engine, "asks_twice")
    rollout, episodes = batch, batch.episodes
    assert [record.stop for record in batch.episodes.records] == ["done"] * 6
    assert episodes.episode_B.tolist() == [number for number in range(6) for _ in range(2)]
    turns = [sorted(set(row_T[row_T >= 0].tolist())) for row_T in episodes.turn_BT]
    assert sorted(map(tuple, turns[:2])) == [(0, 1), (2,)] or sorted(map(tuple, turns[:2])) == [(0,), (1, 2)]
    assert [record.environment_reward for record in batch.episodes.records] == [0, 0, 0.1, 0.1, 0.2, 0.2]
    assert np.array_equal(rollout.sequences.mask_BT, episodes.turn_BT >= 0)
    paid = [float(episodes.reward_BT[2 * number : 2 * number + 2].sum()) for number in range(6)]
    np.testing.assert_allclose(paid, [0, 0, 0.1, 0.1, 0.2, 0.2], rtol=1e-6)
    again = played(engine, "asks_twice")
    np.testing.assert_array_equal(again.sequences.token_BT, rollout.sequences.token_BT)


@pytest.mark.parametrize(
    ("program", "settings", "stop", "paid"),
    [
        ("never_asks", {}, "done", 0.5),
        ("raises", {}, "environment_error", None),
        ("hangs", {"episode_s": 1.0}, "episode_timeout", None),
    ],
)
def test_programs_without_requests_end(engine, program, settings, stop, paid):  # noqa: F811
    batch = played(engine, program, **settings)
    assert {(record.stop, record.environment_reward) for record in batch.episodes.records} == {(stop, paid)}
    assert not batch.sequences.mask_BT.any()
    assert bool(batch.episodes.records[0].failure) == (stop != "done")


def test_programs_continue_under_the_next_policy_and_their_time_limits_pause(engine, weights, tmp_path):  # noqa: F811
    agent = Agent(program="talking_agents:pauses", episode_s=60.0)
    gate = tmp_path / "go on"
    asked = [replace(PROBLEMS[number], record=record) for number, record in enumerate([{}, {"waits_for": str(gate)}])]
    with EnvironmentPool((agent,)) as pool:
        agents = AgentLoop(agent, ChatFormat(TOKENIZER), pool, PROMPT, RESPONSE)
        try:
            first = resume(agents, engine, asked, groups(2), complete=1)
            [slow, _] = [run for group in agents._open._groups.values() for run in group.runs]
            left_s = slow._left_s
            load(engine, jax.tree.map(lambda leaf: np.float32(1.5) * leaf, weights), 4)
            gate.touch()
            rest = resume(agents, engine, asked, groups(2, ended=(0,)))
        finally:
            agents._open.close()
            load(engine, weights, 3)
    assert (prompts(first), prompts(rest)) == ([0], [1]) and 0 < left_s < 60
    assert {record.stop for batch in (first, rest) for record in batch.episodes.records} == {"done"}
    version_BT, mask_BT = rest.version_BT, rest.sequences.mask_BT
    versions = [{*row[chosen].tolist()} for row, chosen in zip(version_BT, mask_BT, strict=True)]
    assert len(versions) == 4 and versions.count({4}) >= 2 and all(len(own) == 1 for own in versions)


@pytest.mark.parametrize(
    ("program", "stop", "limit"), [("asks_twice", "turns", "calls"), ("fills", "tokens_of_episode", "context")]
)
def test_a_program_that_fails_at_a_limit_ended_by_the_limit(engine, program, stop, limit):  # noqa: F811
    batch = played(engine, program, **({"max_turns": 1} if limit == "calls" else {}))
    assert {(record.stop, record.environment_reward) for record in batch.episodes.records} == {(stop, 0.0)}
    assert all(record.metrics == {f"refused_{limit}": 1.0} and record.failure for record in batch.episodes.records)
    assert batch.truncated_B.all() and batch.sequences.mask_BT.any(axis=1).all()
    metrics = episode_metrics(batch.episodes.records, np.ones(len(batch.episodes.records), bool))
    assert metrics[f"episode/ended_{stop}"] == 1 and "time/environment_share" not in metrics
