"""Groups of episodes in flight: a step takes the groups that arrived, and keeps the rest for the next step."""

from dataclasses import replace

import numpy as np
import pytest
from made_steps import done

from jaxrlhf.batch import EpisodeRows, RolloutBatch, Sequences
from jaxrlhf.config import Environment, Refusal
from jaxrlhf.dataflows.batches.in_flight import InFlight
from jaxrlhf.episode import EpisodeRecord
from tests.dataflows.test_in_flight import COPIES, WANTED, Endless, config_of

WIDTH = 12


def config(**changes):
    """Episodes that a step takes as they arrive."""
    return config_of(environment=Environment(factory="made:Talks"), order="arrival", **changes)


def batch_of(numbers, *, rows=1) -> RolloutBatch:
    """Groups of these prompts; every episode is of so many sequences, whose tokens are its prompt's number."""
    prompt_id_B = np.repeat(numbers, COPIES * rows).astype(np.int64)
    shape = len(prompt_id_B), WIDTH
    token_BT = np.broadcast_to(prompt_id_B[:, None], shape).astype(np.int32)
    episode_B = np.repeat([number * COPIES + copy for number in numbers for copy in range(COPIES)], rows)
    names = [f"{number}.{copy}" for number in numbers for copy in range(COPIES)]
    record_E = [EpisodeRecord([], [], "done", failure=name) for name in names]
    return RolloutBatch(
        sequences=Sequences(token_BT, np.full(len(prompt_id_B), WIDTH, np.int32), np.ones(shape, bool), prompt_id_B),
        sampler_logp_BT=np.zeros(shape, np.float32),
        truncated_B=np.zeros(len(prompt_id_B), bool),
        version_BT=np.zeros(shape, np.int32),
        episodes=EpisodeRows(
            episode_B.astype(np.int64),
            np.zeros(shape, np.int16),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int64),
            np.repeat(np.array(record_E, object), rows),
        ),
    )


class Actor:
    """Policy whose groups arrive in the order that is given; all that are due do.

    Attributes:
      asked: `(numbers of the prompts, those that had ended, seeds, due)` of each call.
    """

    def __init__(self, *arrivals, rows=1):
        self.arrivals, self.rows, self.asked = [*arrivals], rows, []

    def continue_groups(self, problems, groups, *, sampling, until):
        assert (groups.copies, until.complete, until.groups) == (COPIES, WANTED, len(problems))
        due = until.due
        numbers = [problem.prompt_id for problem in problems]
        ended = [number for number, over in zip(numbers, groups.complete_P, strict=True) if over]
        self.asked.append((numbers, ended, groups.seed_P.tolist(), due))
        arrived = {*self.arrivals.pop(0), *np.array(numbers)[~groups.complete_P & (groups.started_P <= due)].tolist()}
        ended_B = groups.ended_B | np.repeat(np.isin(numbers, [*arrived]), COPIES)
        rollout = batch_of([number for number in numbers if number in arrived], rows=self.rows)
        return done(replace(groups, ended_B=ended_B, rollout=rollout))


def take(flight, actor, draw, step):
    chosen, batch = flight.take(actor, draw(), step=step, seed=10 + step, draw_more=draw)
    numbers = [problem.prompt_id for problem in chosen]
    assert [*dict.fromkeys(batch.sequences.prompt_id_B.tolist())] == numbers
    names = [record.failure for record in batch.episodes.records]
    assert names == [f"{number}.{copy}" for number in numbers for copy in range(COPIES)]
    assert len(batch.truncated_B) == WANTED * COPIES * actor.rows
    return numbers


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_takes_what_arrived_and_the_next_what_arrived_beyond_it(rows):
    flight = InFlight(config())
    actor = Actor([1, 2, 3, 4, 5], [6, 0, 7], [8], rows=rows)
    draw = Endless()
    assert take(flight, actor, draw, 0) == [1, 2, 3, 4]
    assert flight.metrics["staleness/put_off_groups"] == 2 and flight.metrics["staleness/ready_groups"] == 1
    assert take(flight, actor, draw, 1) == [0, 6, 7, 5]  # those of step 0 first, 5 without being asked for again
    assert [ended for _, ended, _, _ in actor.asked] == [[], [5]]
    assert actor.asked[1][0] == [0, 6, 7, 8, 9, 5]
    assert actor.asked[1][2] == [10, 11, 11, 11, 11, 10]


def test_a_group_that_was_put_off_as_often_as_the_staleness_lets_it_is_due():
    flight, actor, draw = (
        InFlight(config(staleness=2)),
        Actor([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]),
        Endless(),
    )
    taken = [take(flight, actor, draw, step) for step in range(3)]
    assert [0 in numbers for numbers in taken] == [False, False, True]
    assert [due for *_, due in actor.asked] == [-2, -1, 0]


def test_a_run_goes_on_with_what_arrived_and_begins_the_rest_with_the_draws_it_had():
    flight, draw = InFlight(config()), Endless()
    take(flight, Actor([1, 2, 3, 4, 5]), draw, 0)
    after, actor = InFlight(config()), Actor([6, 0, 7])
    after.restore(flight.saved())
    assert after.groups == 2
    assert take(after, actor, draw, 1) == [0, 6, 7, 5]
    assert actor.asked == [([0, 6, 7, 8, 9, 5], [5], [10, 11, 11, 11, 11, 10], 0 - 1)]


def test_groups_that_wait_have_the_sizes_of_the_rollout():
    flight = InFlight(config())
    take(flight, Actor([1, 2, 3, 4, 5]), Endless(), 0)
    with pytest.raises(Refusal, match=r"groups in flight have .* = \(2, 12, 0\), but the rollout has \(2, 13, 0\)"):
        InFlight(config(max_prompt_tokens=5)).restore(flight.saved())
