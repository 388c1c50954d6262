"""Simulated schedules, compared with seconds counted by hand."""

import json

import numpy as np
import pytest
from command_lines import run_module

from jaxrlhf.config import Refusal, load
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.problem import Lengths, question_of
from jaxrlhf.planner.schedules.lengths import LognormalLengths, MeasuredLengths, constant_lengths, read_lengths
from jaxrlhf.planner.schedules.predict import predictions
from jaxrlhf.planner.schedules.report import recommended
from jaxrlhf.planner.schedules.simulation import Schedule, StepTimes, simulate
from jaxrlhf.planner.search.mapping import search
from tests.planner.test_command import refusal


def times(*, slots: int = 4, learn_s: float = 1.0, decode_s: float = 1.0, cache_s: float = 0.0, **others) -> StepTimes:
    """Return times in which a decode step takes one second, and prompts take none."""
    given = {"capacities": (100,), "prefill_s": (0.0, 0.0, 0.0), "round_s": 0.0, "prompt_tokens": 2.0} | others
    return StepTimes(slots, np.array([1, slots]), np.full(2, decode_s), cache_s, learn_s=learn_s, **given)


class Turns:
    """Given lengths of groups, repeated in order."""

    def __init__(self, *rows: list[int]) -> None:
        self.rows, self.next = rows, 0
        self.mean = float(np.mean(rows))

    def sample(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        sampled = [self.rows[(self.next + index) % len(self.rows)] for index in range(groups)]
        self.next += groups
        return np.array(sampled, np.int64).reshape(groups, copies)


@pytest.mark.parametrize(("learn_s", "step_s"), [(3.0, 10.0), (25.0, 25.0)])
def test_a_pool_of_its_own_makes_a_step_as_long_as_the_longer_side(learn_s, step_s):
    found = simulate(Schedule(1, apart=True), times(learn_s=learn_s), constant_lengths(10), groups=2, copies=2)
    assert found.step_s == pytest.approx(step_s)
    assert found.generation_idle == pytest.approx(1 - 10 / step_s)
    assert found.learning_idle == pytest.approx(1 - learn_s / step_s)
    assert (found.age_mean, found.age_max, found.recomputed, found.slots_in_use) == (1, 1, 0, 1)


@pytest.mark.parametrize("schedule", [Schedule(0), Schedule(2), Schedule(0, apart=True)])
def test_in_turns_a_step_is_both(schedule):
    found = simulate(schedule, times(learn_s=3.0), constant_lengths(10), groups=2, copies=2)
    assert found.step_s == pytest.approx(13.0)
    idle = (3 / 13, 10 / 13) if schedule.apart else (0, 0)
    assert (found.generation_idle, found.learning_idle) == pytest.approx(idle)
    assert found.age_mean == schedule.staleness


def test_a_queue_evens_out_batches_that_take_long():
    rows = [4], [4], [4], [28]  # 10 on average; only one in four takes longer than learning
    slow, even = (
        simulate(Schedule(k, apart=True), times(slots=1, learn_s=10.0), Turns(*rows), groups=1, copies=1, steps=40)
        for k in (1, 4)
    )
    assert slow.step_s == pytest.approx((10 + 10 + 10 + 28) / 4)
    assert even.step_s == pytest.approx(10, rel=0.02)
    assert even.age_max == 4


def test_slots_take_the_next_response_as_one_ends():
    # Two slots: 5 then 1 (until 6), and 2 then 4 (until 6).
    found = simulate(Schedule(0), times(slots=2, learn_s=0.0), Turns([5, 2, 4, 1]), groups=1, copies=4)
    assert found.step_s == pytest.approx(6.0)
    assert found.slots_in_use == 1


def test_caches_and_prompts_take_their_time():
    # Positions 3, 4, 5 after a prompt of 2: capacities 4, 4, 8. A prompt takes 1 + 2 * 10 + 4 * 100.
    given = times(slots=1, cache_s=0.5, capacities=(4, 8), prefill_s=(1.0, 10.0, 100.0), round_s=7.0, learn_s=2.0)
    found = simulate(Schedule(0), given, constant_lengths(3), groups=1, copies=1)
    assert found.step_s == pytest.approx(7 + 1 + 20 + 400 + 3 + 0.5 * (4 + 4 + 8) + 2)


def test_a_straggler_goes_on_in_the_next_round():
    # A step takes two of three groups. The group of 9 tokens is postponed once, after 3 tokens.
    rows = [9], [3], [3], [3], [3]
    settled = simulate(Schedule(1, 1.5), times(slots=3, learn_s=0.0), Turns(*rows), groups=2, copies=1, steps=200)
    whole = simulate(Schedule(0), times(slots=3, learn_s=0.0), Turns(*rows), groups=2, copies=1, steps=200)
    first = settled.rounds[:2]
    assert [one.end_s - one.start_s for one in first] == [3, 6]
    assert settled.age_max == 1
    assert 0 < settled.age_mean < 0.5
    assert settled.recomputed > 0
    assert settled.step_s < whole.step_s
    # Its prompt of 2 tokens and its 3 tokens are computed again, about every fifth round.
    costly = times(slots=3, learn_s=0.0, prefill_s=(0.0, 1.0, 0.0))
    again = simulate(Schedule(1, 1.5), costly, Turns(*rows), groups=2, copies=1, steps=200)
    prompts_s, tokens = 2 * 2, sum(one[0] for one in rows) / len(rows) * 2
    assert again.recomputed == settled.recomputed
    assert again.step_s - settled.step_s == pytest.approx(prompts_s + again.recomputed * tokens, rel=0.02)


def test_no_group_is_older_than_the_staleness():
    lengths = LognormalLengths(40, 150, 200)
    for apart, staleness in ((False, 1), (False, 3), (True, 2), (True, 4)):
        schedule = Schedule(staleness, 1.5, apart)
        found = simulate(schedule, times(slots=64), lengths, groups=16, copies=4)
        assert schedule.lead <= found.age_mean < found.age_max <= staleness
        assert found == simulate(schedule, times(slots=64), lengths, groups=16, copies=4)


def test_lognormal_lengths_have_their_mean_and_tail():
    sampled = LognormalLengths(100, 400, 10_000).sample(np.random.default_rng(0), 20_000, 5)
    assert np.mean(sampled) == pytest.approx(100.5, rel=0.01)  # lengths are rounded up
    assert np.quantile(sampled, 0.99) == pytest.approx(400, rel=0.02)
    cut = LognormalLengths(100, 400, 150)
    assert cut.sample(np.random.default_rng(0), 20_000, 5).max() == 150
    assert cut.mean == pytest.approx(np.mean(cut.sample(np.random.default_rng(0), 20_000, 5)) - 0.5, rel=0.01)


def test_lengths_of_a_run_stay_with_their_prompts(tmp_path):
    rows = [("a", 3), ("b", 50), ("a", 4), ("b", 60)]
    text = [json.dumps({"step": 1, "prompt": prompt, "response_length": length}) for prompt, length in rows]
    (tmp_path / "samples.jsonl").write_text("\n".join(text) + "\n")
    lengths = read_lengths(tmp_path / "samples.jsonl")
    assert isinstance(lengths, MeasuredLengths)
    assert lengths.mean == 29.25
    sampled = {tuple(sorted(group)) for group in lengths.sample(np.random.default_rng(0), 20, 2).tolist()}
    assert sampled == {(3, 4), (50, 60)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(0, 1.5), "staleness=0 allows none; set staleness to 1 or more"),
        (lambda: Schedule(1, 1.5, apart=True), "set staleness to 2 or more if generation has separate devices"),
        (lambda: Schedule(1, 2.5), "over_provision must be from 1 to 2, got 2.5"),
        (lambda: LognormalLengths(100, 50, 200), "above the mean and at most 1497, got 50"),
        (lambda: LognormalLengths(300, 500, 200), "at most the longest response, 200 tokens, got 300"),
        (lambda: read_lengths("nowhere.jsonl"), "give the samples.jsonl of a run"),
        (lambda: read_lengths("."), "give the samples.jsonl of a run"),
    ],
)
def test_contradictions_are_refused(make, message):
    with pytest.raises(Refusal, match=message):
        make()


def test_constant_lengths_take_as_long_as_the_plan_says():
    config = load("grpo_gsm8k")
    problem = question_of(config, hardware_of(config, "h100x2"), lengths=Lengths(512, 512)).problem
    best = search(problem).plans[0]
    synchronous, *others = predictions(problem, best, constant_lengths(512), staleness=1)
    assert synchronous.prediction.step_s == pytest.approx(best.seconds, rel=0.03)
    assert all(one.plan.pools[-1].roles == ("rollout",) or one.plan.pools[0].roles == ("rollout",) for one in others)
    best_other = min(one.prediction.step_s for one in others)
    chosen = recommended([synchronous, *others])
    assert (chosen is None) == (best_other * 1.02 > synchronous.prediction.step_s)


@pytest.mark.slow
def test_the_command_prints_schedules(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ("--config", "grpo_gsm8k", "--hardware", "h100x2", "--length-mean", 150, "--length-tail", 500)
    run_module("plan", *asked, "--staleness", 2, "--over-provision", 1.5, "--json")
    printed = json.loads(capsys.readouterr().out)
    assert [row["staleness"] for row in printed["schedules"]][:2] == [0, 2]
    assert printed["workload"]["response_tokens"] == pytest.approx(150, rel=0.05)
    run_module("plan", *asked, "--rollout.staleness", 2, "--rollout.over_provision", 1.5)
    shown = capsys.readouterr().out
    assert "schedules, simulated" in shown and f"{printed['schedules'][0]['step_s']:.1f}" in shown
    assert "give both" in refusal(capsys, *asked[:4], "--length-mean", 3)
    assert "requires --staleness" in refusal(capsys, *asked[:4], "--over-provision", 1.5)
    assert "give only one of them" in refusal(capsys, *asked, "--response-tokens", 3)
