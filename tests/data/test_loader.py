"""The loader: full batches, every problem once in an epoch, resumable at the exact batch."""

import json

import numpy as np
import pytest

from jaxrlhf.batch import Problem
from jaxrlhf.config import Refusal
from jaxrlhf.data.loader import Loader


def problems(count):
    return [Problem(prompt_id=n, prompt=str(n), prompt_tokens=(n,)) for n in range(count)]


def ids(loader, batches):
    return [[problem.prompt_id for problem in loader.next()] for _ in range(batches)]


def test_an_epoch_is_a_shuffle_and_the_next_one_another():
    loader = Loader(problems(12), per_step=4, seed=3)
    first, second = np.ravel(ids(loader, 3)), np.ravel(ids(loader, 3))
    for epoch in (first, second):
        assert sorted(epoch) == list(range(12))
        assert list(epoch) != list(range(12))
    assert list(first) != list(second)


def test_the_seed_decides():
    def batches(seed):
        return ids(Loader(problems(50), per_step=7, seed=seed), 20)

    assert batches(1) == batches(1)
    assert batches(1) != batches(2)
    assert batches(-1) != batches(1)


def test_the_order_never_changes():
    # Written down once; a run of today must be resumable by tomorrow's numpy.
    assert ids(Loader(problems(10), per_step=5, seed=0), 2) == [[0, 2, 9, 1, 8], [5, 4, 3, 6, 7]]


def test_batches_are_full_and_hold_no_problem_twice():
    for batch in ids(Loader(problems(10), per_step=4, seed=0), 50):
        assert len(set(batch)) == 4


def test_problems_left_over_in_an_epoch_are_used_later():
    seen = np.ravel(ids(Loader(problems(10), per_step=4, seed=0), 40))
    counts = np.bincount(seen, minlength=10)
    assert counts.min() >= 8  # 16 on average over 20 epochs


@pytest.mark.parametrize("taken", range(9))  # 2 batches an epoch: within epochs and on their borders
def test_restoring_gives_the_same_batches(taken):
    loader = Loader(problems(10), per_step=4, seed=5)
    ids(loader, taken)
    state = json.loads(json.dumps(loader.state()))
    expected = ids(loader, 7)

    resumed = Loader(problems(10), per_step=4, seed=5)
    ids(resumed, 3)
    resumed.restore(state)
    assert ids(resumed, 7) == expected


def test_state_is_a_snapshot():
    loader = Loader(problems(6), per_step=2, seed=0)
    before = loader.state()
    copy = dict(before)
    loader.next()
    assert before == copy != loader.state()


@pytest.mark.parametrize(("count", "seed"), [(11, 0), (10, 1)])
def test_the_state_of_other_data_is_refused(refused, count, seed):
    state = Loader(problems(10), per_step=2, seed=0).state()
    with refused():
        Loader(problems(count), per_step=2, seed=seed).restore(state)


@pytest.mark.parametrize("per_step", [0, 5])
def test_a_step_cannot_take_more_problems_than_exist(refused, per_step):
    with refused():
        Loader(problems(4), per_step=per_step, seed=0)


def test_other_records_are_refused_unless_an_older_state_has_no_fingerprint():
    state = Loader(problems(10), per_step=2, seed=0, fingerprint="these").state()
    Loader(problems(10), per_step=2, seed=0, fingerprint="these").restore(state)
    with pytest.raises(Refusal, match=r"records=these and this run has records=those"):
        Loader(problems(10), per_step=2, seed=0, fingerprint="those").restore(state)
    del state["records"]
    Loader(problems(10), per_step=2, seed=0, fingerprint="those").restore(state)
