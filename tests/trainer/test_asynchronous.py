"""The off-policy schedule: which policy draws what, what may wait, and what a checkpoint keeps of it."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_steps import Made, done, problem, rollout_of

from jaxrlhf.checkpoint import Damaged
from jaxrlhf.config import (
    GRPO,
    SFT,
    Agent,
    Arithmetic,
    ColdStart,
    Config,
    Environment,
    FromScratch,
    IcePop,
    KLInLoss,
    Pool,
    Refusal,
    Rollout,
    RolloutServer,
    Selection,
    TruncatedImportance,
    checked,
)
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.trainer.asynchronous.collector import Collector
from jaxrlhf.trainer.asynchronous.off_policy import OffPolicy, age_metrics
from jaxrlhf.trainer.asynchronous.queue_item import QUEUE, settled
from jaxrlhf.trainer.schedule import Synchronous
from jaxrlhf.workers.build import Builder
from jaxrlhf.workers.summary import pool_rows

APART = (Pool("policy", 1, ("actor", "reference")), Pool("generation", 1, ("rollout", "reward")))
PROMPTS, COPIES, STEPS, PATIENCE_S = 2, 2, 6, 60.0


@dataclass
class Versioned(Made):
    """An actor that counts its updates, and says so in what it samples; its copies sample as of when they were made.

    Attributes:
      copied: Version of a copy; None for the actor itself.
    """

    version: int = 0
    copied: int | None = None

    def generate_sequences(self, problems, sampling, **how):
        rollout = super().generate_sequences(
            problems, sampling, responses_per_prompt=how["responses_per_prompt"], seed=0
        )
        version = self.version if self.copied is None else self.copied
        return done(replace(rollout.result(), version_BT=np.full_like(rollout.result().version_BT, version)))

    def compute_ref_log_prob(self, rollout):
        return self.compute_log_prob(rollout)

    def update_actor(self, minibatches, *, objective, settings):
        self.version += 1
        return super().update_actor(minibatches, objective=objective, settings=settings)


class MadeRoles(SimpleNamespace):
    """Roles of one actor, which generates on its own devices or apart."""

    def snapshot(self, *, waiting):
        assert waiting == self.waiting
        if not self.generates_apart:
            return self
        return MadeRoles(**{**vars(self), "actor": replace(self.actor, copied=self.actor.version)})


class Counted:
    """A loader whose position is the number of the next problem."""

    def __init__(self):
        self.at = 0

    def next(self):
        self.at += PROMPTS
        return [problem(self.at - PROMPTS + number) for number in range(PROMPTS)]

    def state(self):
        return self.at

    def restore(self, at):
        self.at = at


def config_of(staleness: int, **algorithm) -> Config:
    return Config(
        name="made",
        algorithm=GRPO(responses_per_update=PROMPTS * COPIES, kl=KLInLoss(), **algorithm),
        steps=STEPS,
        model=FromScratch(),
        data=Arithmetic(),
        rollout=Rollout(prompts_per_step=PROMPTS, responses_per_prompt=COPIES, staleness=staleness),
    )


def schedule_of(staleness: int, *, apart: bool, version: int = 0) -> Synchronous:
    def generate(problems, copies):
        ids = np.repeat([one.prompt_id for one in problems], copies)
        return rollout_of(np.ones((len(ids), 3), bool), ids)

    actor = Versioned(generate, lambda rollout: rollout.sequences.token_BT[:, 0], version=version)
    roles = MadeRoles(actor=actor, reward=actor, reference=actor, generates_apart=apart, waiting=staleness + 1)
    return (OffPolicy if staleness else Synchronous)(config_of(staleness), roles, Counted())


def steps_of(schedule: Synchronous, steps: range) -> list[tuple[list[int], int, float]]:
    """Prompts of each step, the version that answered them, and the mean age that the schedule reports."""
    state, found = schedule.config.algorithm.initial_state(), []
    for index in steps:
        collected, result = schedule.step(index, state, doing=lambda task: None)
        [version] = {*collected.rollout.result().version_BT.ravel().tolist()}
        found.append(
            ([one.prompt_id for one in collected.problems], version, schedule.metrics().get("staleness/age_mean"))
        )
        state = result.state
    return found


@pytest.mark.parametrize("apart", [False, True], ids=["one pool", "two pools"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_each_step_learns_from_what_the_policy_of_so_many_steps_before_drew(staleness, apart):
    schedule = schedule_of(staleness, apart=apart)
    found = steps_of(schedule, range(STEPS))
    schedule.close()
    in_order = steps_of(schedule_of(0, apart=False), range(STEPS))
    assert [prompts for prompts, *_ in found] == [prompts for prompts, *_ in in_order]
    assert [version for _, version, _ in found] == [max(0, index - staleness) for index in range(STEPS)]
    assert [age for *_, age in found] == [min(index, staleness) for index in range(STEPS)]


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("at", [1, 3])
def test_what_waits_is_in_the_checkpoint_and_learnt_from_once(staleness, at, tmp_path):
    whole = steps_of(schedule_of(staleness, apart=False), range(STEPS))
    before = schedule_of(staleness, apart=True)
    found = steps_of(before, range(at))
    host = before.state() | {"counters": {"version": at}}
    before.items()[QUEUE].save(tmp_path)
    before.close()
    after = schedule_of(staleness, apart=True, version=at)
    after.items()[QUEUE].restore(tmp_path)
    after.restore(host)
    found_after = []
    state = after.config.algorithm.initial_state()
    for index in range(at, STEPS):
        collected, _ = after.step(index, state, doing=lambda task: None)
        rollout = settled(collected.rollout)
        [version] = {*rollout.version_BT.ravel().tolist()}
        found_after.append(
            ([one.prompt_id for one in collected.problems], version, after.metrics()["staleness/age_mean"])
        )
    after.close()
    assert found + found_after == whole


def test_a_run_goes_on_at_a_higher_staleness_and_is_refused_at_a_lower_one():
    saved = {"loader": 6, "counters": {"version": 1}, "queued": 2, "begun": 3}
    with pytest.raises(Refusal, match="staleness=1"):
        schedule_of(1, apart=False).restore(saved)
    with pytest.raises(Refusal, match="staleness=0"):
        schedule_of(0, apart=False).restore(saved)
    synchronous = {"loader": 2, "counters": {"version": 1}}
    schedule = schedule_of(2, apart=False, version=1)
    schedule.restore(synchronous)
    assert [(prompts[0], version) for prompts, version, _ in steps_of(schedule, range(1, 5))] == [
        *((2, 1), (4, 1), (6, 1)),
        (8, 2),
    ]


def over_provisioned(staleness: int, *, over: float = 1.5, **changes) -> Config:
    config = config_of(staleness)
    rollout = replace(config.rollout, over_provision=over, prompts_per_step=4, **changes)
    return checked(replace(config, rollout=rollout, algorithm=replace(config.algorithm, responses_per_update=8)))


@pytest.mark.parametrize(
    ("staleness", "pools", "ahead"),
    [(1, (), 0), (4, (), 0), (2, APART, 1), (4, APART, 1)],
)
def test_groups_that_go_on_leave_fewer_steps_to_collect_ahead(staleness, pools, ahead):
    config = replace(over_provisioned(staleness), pools=pools)
    assert (config.steps_ahead, config.rollout.groups_in_flight) == (ahead, 6)
    whole = replace(config.rollout, over_provision=1.0)
    assert replace(config, rollout=whole).steps_ahead == staleness
    [cold, _] = replace(config, pools=(), cold_start=ColdStart(steps=2)).phases
    assert (cold.rollout.staleness, cold.rollout.over_provision) == (0, 1)


def test_where_a_run_has_groups_under_way_it_goes_on_with_over_provision_alone():
    saved = {"loader": 6, "counters": {"version": 1}, "queued": 0, "begun": 1, "under_way": 2}
    for schedule in (schedule_of(0, apart=False), schedule_of(2, apart=False)):
        with pytest.raises(Refusal, match=r"holds 2 unfinished groups of responses"):
            schedule.restore(dict(saved))
    roles = MadeRoles(actor=None, generates_apart=False)
    for lost in ({}, {"queued": 1, "under_way": 0}):
        with pytest.raises(Damaged, match="its items hold 0 and 0; resume from an earlier checkpoint"):
            OffPolicy(config_of(2) if lost else over_provisioned(2), roles, Counted()).restore(saved | lost)
    OffPolicy(over_provisioned(2), roles, Counted()).restore(saved | {"under_way": 0})
    with pytest.raises(Refusal, match=r"over_provision=1\.5 allows 0; resume with rollout\.staleness=2 or more and"):
        OffPolicy(over_provisioned(2), roles, Counted()).restore(saved | {"queued": 2})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"staleness": 0}, "allows no postponed groups; set rollout.staleness to 1 or more"),
        ({"over": 2.5}, r"over_provision must be in \[1\.0, 2\.0\]"),
        ({"replay_routing": True}, "are not recorded for replay_routing"),
        ({"server": RolloutServer(("http://127.0.0.1:1",))}, "completes every request"),
        ({"speculation": "auto"}, "the tokens of a call depend on timings"),
    ],
)
def test_groups_are_not_put_off_where_they_could_not_go_on(changes, said):
    with pytest.raises(Refusal, match=said):
        over_provisioned(**{"staleness": 1} | changes)
    with pytest.raises(Refusal, match=r"already uses one step of staleness; set rollout\.staleness to 2 or more"):
        checked(replace(over_provisioned(2), pools=APART, rollout=over_provisioned(1).rollout))
    with pytest.raises(Refusal, match=r"'arrival' uses the episodes that end first.*the order counts tokens"):
        over_provisioned(1, order="arrival")


def test_that_episodes_arrive_by_the_clock_of_their_tools_has_to_be_said():
    game, arrival = Environment("own.py:Game"), over_provisioned(1).rollout
    with pytest.raises(Refusal, match="to accept this, set rollout"):
        checked(replace(over_provisioned(1), environment=game))
    arrival = replace(arrival, order="arrival")
    said = replace(over_provisioned(1), environment=game, rollout=arrival)
    [cold, _] = replace(said, cold_start=ColdStart(steps=2)).phases
    assert cold.rollout.order == "deterministic"
    with pytest.raises(Refusal, match="with over_provision=1 a step uses all episodes"):
        checked(replace(said, rollout=replace(arrival, over_provision=1)))
    assert checked(replace(said, environment=Agent("own.py:agent"))).rollout.order == "arrival"


def test_others_generate_between_two_collections_and_the_rest_go_on_waiting():
    collector, first, seen = Collector(apart=True), Future(), []
    running = collector.submit(lambda: seen.append("first") or first.result(PATIENCE_S))
    waiting = collector.submit(lambda: seen.append("second"))
    threading.Timer(0.05, first.set_result, [None]).start()
    with collector.paused():
        assert running.done() or first.done()
        seen.append("evaluation")
        assert not waiting.done()
    waiting.result(PATIENCE_S)
    collector.close()
    assert seen == ["first", "evaluation", "second"]


def test_a_collection_is_made_once_its_responses_are_there():
    rollout: Future = Future()
    collector = Collector(apart=True)
    collected = collector.submit(lambda: ScoredRollout([], rollout, Future()))
    with pytest.raises(TimeoutError):
        collected.result(0.05)
    rollout.set_result(None)
    assert collected.result(PATIENCE_S).rollout is rollout
    collector.close()


def test_ages_are_of_the_tokens_that_the_policy_chose():
    rollout = rollout_of(np.array([[False, True, True, True], [False, True, False, False]]), [0, 0])
    rollout = replace(rollout, version_BT=np.array([[-1, 3, 4, 4], [-1, 5, -1, -1]], np.int32))
    assert age_metrics(ScoredRollout([], rollout, None), 5) == {
        "staleness/age_mean": 1.0,
        "staleness/age_max": 2.0,
        "staleness/share_age_0": 0.25,
        "staleness/share_age_1": 0.5,
        "staleness/share_age_2": 0.25,
    }


def test_the_correction_is_chosen_by_the_staleness_unless_it_is_given():
    def chosen(staleness, **algorithm):
        config = checked(config_of(staleness, **algorithm))
        return config.algorithm.correction_for(config.rollout), config.algorithm.trusts_sampler(config.rollout)

    assert chosen(0) == (None, True)
    assert chosen(1) == (TruncatedImportance(), False)
    assert chosen(1, correction=None) == (None, False)
    assert chosen(1, correction=IcePop()) == (IcePop(), False)
    assert chosen(1, old_logp="bypass") == (None, True)
    with pytest.raises(Refusal, match="older versions"):
        chosen(1, old_logp="sampler")


def test_what_samples_nothing_has_no_staleness():
    config = config_of(1)
    with pytest.raises(Refusal, match="SFT generates no responses"):
        checked(replace(config, algorithm=SFT(examples_per_update=2)))


def test_problems_are_not_left_out_by_scores_that_come_after_they_are_sampled():
    with pytest.raises(Refusal, match=r"selection\.online filters problems"):
        checked(replace(config_of(1), selection=Selection(online=True)))


@pytest.mark.parametrize(("staleness", "over_provision", "sets"), [(0, 1.0, None), (2, 1.0, 3), (2, 1.5, 2)])
def test_the_table_at_start_says_what_waits_in_the_memory_of_hosts_that_generate(staleness, over_provision, sets):
    config = config_of(staleness)
    config = replace(config, pools=APART, rollout=replace(config.rollout, over_provision=over_provision))
    pool = ResourcePool("generation", tuple(jax.devices()[:1]))
    builder = Builder(config, embedded_tokenizer(), pool, ("rollout", "reward"), progress=lambda *_: None)
    rows = {row[:2]: row[2] for row in pool_rows(builder)}
    weights = rows["generation", "weights"]
    assert rows.get(("generation", "next weights")) == (f"up to {sets} x {weights}" if sets else None)
