"""Groups in flight: groups that a step takes, groups that continue, and groups that start in their place."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_steps import done

from jaxrlhf.batch import Image, Problem, RolloutBatch, Scores
from jaxrlhf.config import DAPO, GRPO, Arithmetic, Config, FromScratch, Refusal, ReMax, Rollout, Sampling
from jaxrlhf.dataflows import remax
from jaxrlhf.dataflows.batches.in_flight import InFlight
from jaxrlhf.dataflows.collect import dynamic_sampling, responses
from jaxrlhf.dataflows.step import StepInput

WANTED, COPIES = 4, 2


def config_of(over: float = 1.5, *, staleness: int = 2, algorithm=None, environment=None, **rollout) -> Config:
    return Config(
        name="made",
        algorithm=algorithm or GRPO(responses_per_update=WANTED * COPIES),
        steps=9,
        model=FromScratch(),
        data=Arithmetic(),
        environment=environment,
        rollout=Rollout(
            prompts_per_step=WANTED,
            responses_per_prompt=COPIES,
            staleness=staleness,
            over_provision=over,
            **{"max_prompt_tokens": 4, "max_response_tokens": 8} | rollout,
        ),
    )


def problem(number: int, images: tuple[Image, ...] = ()) -> Problem:
    return Problem(prompt_id=number, prompt=f"{number}", prompt_tokens=(1, 2), images=images)


class Endless:
    """Problems 0, 1, 2, … by as many as a step has; from the first again after `most`."""

    def __init__(self, most: int = 10**6):
        self.at, self.most = 0, most

    def __call__(self) -> list[Problem]:
        self.at += WANTED
        return [problem(number % self.most) for number in range(self.at - WANTED, self.at)]


class Actor:
    """Policy whose groups take as many rounds as their prompt's number says, and at most until they are due.

    Attributes:
      rounds: Rounds that the groups of a prompt take, by its number; 1 where nothing is said.
      asked: `(numbers of the prompts, due)` of each round.
    """

    def __init__(self, rounds: dict[int, int] | None = None):
        self.rounds, self.asked, self._left = rounds or {}, [], {}

    def continue_groups(self, problems, in_progress, *, sampling, until):
        complete, due = until.complete, until.due
        assert complete == WANTED and until.groups == len(problems)
        self.asked.append(([one.prompt_id for one in problems], due))
        sampled = jax.tree.map(np.array, in_progress)
        for group, one in enumerate(problems):
            left = self._left.setdefault(one.prompt_id, self.rounds.get(one.prompt_id, 1)) - 1
            self._left[one.prompt_id] = left
            if left <= 0 or in_progress.started_P[group] <= due:
                sampled.ended_B[group * COPIES : (group + 1) * COPIES] = True
                del self._left[one.prompt_id]
            rows = np.flatnonzero(~in_progress.ended_B)
            rows = rows[(rows // COPIES) == group]
            column = sampled.rollout.sequences.length_B[rows]
            sampled.rollout.sequences.mask_BT[rows, column] = True
            sampled.rollout.sequences.length_B[rows] += 1
        for group, one in enumerate(problems):  # a round continues until enough groups are complete
            if sampled.complete_P.sum() < complete:
                sampled.ended_B[group * COPIES : (group + 1) * COPIES] = True
                self._left.pop(one.prompt_id, None)
        return done(sampled)


def rounds_of(flight: InFlight, actor: Actor, draw: Endless, steps: range) -> list[list[int]]:
    """Numbers of the prompts that each step takes."""
    taken = []
    for step in steps:
        chosen, rollout = flight.take(actor, draw(), step=step, seed=10 + step, draw_more=draw)
        assert rollout.sequences.prompt_id_B.tolist() == [one.prompt_id for one in chosen for _ in range(COPIES)]
        taken.append([one.prompt_id for one in chosen])
    return taken


def test_a_step_takes_complete_groups_and_the_next_problems_begin_in_their_places():
    flight, actor = InFlight(config_of()), Actor({1: 2, 2: 3})
    assert rounds_of(flight, actor, Endless(), range(3)) == [[0, 3, 4, 5], [6, 1, 7, 8], [10, 11, 2, 9]]
    assert [places for places, _ in actor.asked] == [[0, 1, 2, 3, 4, 5], [6, 1, 2, 7, 8, 9], [10, 11, 2, 12, 13, 9]]


def test_groups_that_were_put_off_before_go_first():
    flight, actor = InFlight(config_of()), Actor()
    assert rounds_of(flight, actor, Endless(), range(2)) == [[0, 1, 2, 3], [6, 7, 4, 5]]


@pytest.mark.parametrize(("staleness", "put_off"), [(1, 1), (2, 2), (4, 4)])
def test_a_group_that_was_put_off_as_often_as_the_staleness_lets_it_has_to_be_complete(staleness, put_off):
    flight, actor = InFlight(config_of(staleness=staleness)), Actor({0: 99})
    taken = rounds_of(flight, actor, Endless(), range(6))
    assert [0 in numbers for numbers in taken].index(True) == put_off
    assert [due for _, due in actor.asked] == [step - put_off for step in range(6)]


def test_responses_keep_the_seed_that_they_began_with_and_what_was_sampled():
    flight, actor = InFlight(config_of()), Actor({0: 3})
    rounds_of(flight, actor, Endless(), range(2))
    place = [one.prompt_id for one in flight.problems].index(0)
    rows = slice(place * COPIES, (place + 1) * COPIES)
    assert flight.open.seed_P[place] == 10 and flight.open.started_P[place] == 0
    assert flight.open.rollout.sequences.mask_BT[rows].sum(axis=1).tolist() == [2, 2]
    assert {*flight.open.seed_P.tolist()} == {10, 11}


def test_a_prompt_that_is_under_way_waits_until_its_group_was_taken():
    flight, actor, draw = InFlight(config_of(staleness=4)), Actor({0: 3, 1: 3}), Endless(most=8)
    taken = rounds_of(flight, actor, draw, range(5))
    assert all(len(numbers) == len({*numbers}) for numbers, _ in actor.asked)
    assert all(len(numbers) == len({*numbers}) for numbers in taken)
    assert [0 in numbers for numbers in taken[:3]] == [False, False, True]
    given = np.bincount(np.arange(draw.at) % 8)
    waiting = [one.prompt_id for one in flight.saved()["waiting"]]
    left = [one.prompt_id for place, one in enumerate(flight.problems) if place not in flight.saved()["free"]]
    assert 0 in waiting or 0 in left  # it was sampled again, and nothing that was sampled is lost
    np.testing.assert_array_equal(np.bincount(np.concatenate([*taken, waiting, left]).astype(int)), given)


def test_data_with_fewer_problems_than_places_are_refused():
    with pytest.raises(Refusal, match=r"over_provision keeps 6 prompts in flight, but the data have only 5"):
        rounds_of(InFlight(config_of()), Actor(), Endless(most=5), range(1))


def test_a_run_that_goes_on_from_what_was_saved_takes_the_same_groups():
    slow = {1: 3, 2: 2, 5: 9, 8: 2, 11: 4}
    whole = rounds_of(InFlight(config_of(1.75)), Actor(slow), Endless(), range(6))
    flight, actor, draw = InFlight(config_of(1.75)), Actor(slow), Endless()
    before = rounds_of(flight, actor, draw, range(3))
    after = InFlight(config_of(1.75))
    after.restore(flight.saved())
    assert after.groups == flight.groups == 3
    assert before + rounds_of(after, actor, draw, range(3, 6)) == whole


@pytest.mark.parametrize(("over", "places"), [(2.0, 8), (1.25, 5)])
def test_a_run_goes_on_with_more_places_or_with_fewer(over, places):
    flight, actor, draw = InFlight(config_of()), Actor({1: 3, 2: 3}), Endless()
    first = rounds_of(flight, actor, draw, range(1))
    after = InFlight(config_of(over))
    after.restore(flight.saved())
    later = rounds_of(after, actor, draw, range(1, 4))
    assert [len(numbers) for numbers, _ in actor.asked[1:]] == [max(places, 6 - WANTED)] * 3
    every = [number for numbers in first + later for number in numbers]
    assert len(every) == len({*every}) and {1, 2} <= {*every}


@pytest.mark.parametrize(
    "changed", [{"responses_per_prompt": 3}, {"max_response_tokens": 9}, {"sampling": Sampling(top_k=5)}]
)
def test_groups_under_way_go_on_with_the_sizes_that_they_began_with(changed):
    flight, config = InFlight(config_of()), config_of()
    rounds_of(flight, Actor(), Endless(), range(1))
    algorithm = GRPO(responses_per_update=WANTED * changed.get("responses_per_prompt", COPIES))
    other = replace(config, algorithm=algorithm, rollout=replace(config.rollout, **changed))
    with pytest.raises(Refusal, match="resume with the original settings"):
        InFlight(other).restore(flight.saved())


def test_rounds_are_counted():
    flight, actor = InFlight(config_of()), Actor({0: 2, 1: 2})
    rounds_of(flight, actor, Endless(), range(1))
    # Two tokens of each group were sampled, one a response; two groups are not complete, and nobody waits complete.
    counts = {"put_off_groups": 2, "sampled_tokens": 12, "recomputed_tokens": 4}
    assert flight.metrics == {f"staleness/{name}": value for name, value in counts.items()}


def test_images_come_with_the_groups_that_are_taken():
    image = Image("a.png", "digest", (1, 2, 2), 0, 1)
    flight = InFlight(config_of())
    given = [problem(number, (image,) if number == 1 else ()) for number in range(WANTED)]
    chosen, rollout = flight.take(Actor(), given, step=0, seed=1, draw_more=Endless())
    expected = [one.images for one in chosen for _ in range(COPIES)]
    assert rollout.sequences.images_B.tolist() == expected and (image,) in expected
    assert flight.open.rollout.sequences.images_B is None


def test_kept_tokens_have_as_many_columns_as_sampling_records():
    flight = InFlight(config_of(sampling=Sampling(top_k=5)))
    flight.take(Actor(), Endless()(), step=0, seed=1, draw_more=Endless())
    assert flight.open.rollout.sequences.recorded["kept"].shape == (6 * COPIES, 12, 5)


def roles_of(actor: Actor) -> SimpleNamespace:
    """Roles whose rewards are the numbers of the prompts, and for which greedy responses are recorded."""
    actor.greedy = []

    def generate(problems, sampling, **how):
        assert sampling.greedy
        actor.greedy.append([one.prompt_id for one in problems])
        return done("greedy")

    def reward(problems, rollout):
        copies = COPIES if isinstance(rollout, RolloutBatch) else 1
        ids = np.array([one.prompt_id for one in problems for _ in range(copies)], float)
        return done(Scores(ids, np.ones(len(ids), bool), {}))

    actor.generate_sequences = generate
    return SimpleNamespace(actor=actor, reward=SimpleNamespace(compute_reward=reward))


def work_of(config: Config, draw: Endless) -> StepInput:
    return StepInput(config, draw(), 0, {}, draw_more=draw, in_flight=InFlight(config))


def test_scores_are_of_the_groups_that_were_taken():
    actor, draw = Actor({0: 2}), Endless()
    collected = responses(roles_of(actor), work_of(config_of(), draw))
    assert [one.prompt_id for one in collected.problems] == [1, 2, 3, 4]
    assert collected.scores.result().score_B[::COPIES].tolist() == [1, 2, 3, 4]


def test_greedy_baselines_are_of_the_problems_that_were_taken():
    actor, draw = Actor({0: 2}), Endless()
    config = config_of(algorithm=ReMax(responses_per_update=WANTED * COPIES))
    collected = remax.collect(roles_of(actor), work_of(config, draw))
    assert actor.greedy == [[1, 2, 3, 4]]
    assert collected.beside.scores.result().score_B.tolist() == [1, 2, 3, 4]


def test_dynamic_sampling_goes_through_rounds_until_enough_groups_are_informative():
    actor, draw = Actor({0: 2, 9: 2}), Endless()
    config = config_of(algorithm=DAPO(responses_per_update=WANTED * COPIES))
    informative = lambda scores, ids_B: ids_B % 2 == 0  # noqa: E731
    roles, work = roles_of(actor), work_of(config, draw)
    groups = dynamic_sampling(roles, work, informative, max_rounds=3, wanted="of even prompts")
    assert [one.prompt_id for one in groups.problems] == [1, 2, 3, 4, 0, 6, 7, 8]
    assert groups.informative_P.tolist() == [False, True, False, True, True, True, False, True]
