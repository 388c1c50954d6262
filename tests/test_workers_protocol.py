"""Transfer protocols with more than one rank."""

import numpy as np
import pytest

from jaxrlhf.batch import Sequences
from jaxrlhf.workers.protocol import DP_PROTO, ONE_TO_ALL
from jaxrlhf.workers.roles import Actor, Critic, Reference, Reward


def batch(rows: int) -> Sequences:
    token_BT = np.arange(rows * 3).reshape(rows, 3)
    return Sequences(token_BT, np.full(rows, 3), token_BT > 0, np.arange(rows))


def test_data_parallel_ranks_get_equal_parts_that_join_again() -> None:
    whole = batch(6)
    parts = DP_PROTO.distribute(whole, 3)
    assert [part.token_BT.shape for part in parts] == [(2, 3)] * 3
    np.testing.assert_array_equal(parts[1].prompt_id_B, [2, 3])
    joined = DP_PROTO.collect(parts)
    np.testing.assert_array_equal(joined.token_BT, whole.token_BT)
    np.testing.assert_array_equal(joined.mask_BT, whole.mask_BT)


def test_rows_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows does not split over 2"):
        DP_PROTO.distribute(batch(5), 2)


def test_one_to_all_hands_every_rank_the_same() -> None:
    whole = batch(2)
    assert all(part is whole for part in ONE_TO_ALL.distribute(whole, 4))
    assert ONE_TO_ALL.collect([1, 2, 3]) == 1


@pytest.mark.parametrize(
    ("worker", "name", "protocol"),
    [
        (Actor, "generate_sequences", ONE_TO_ALL),
        (Actor, "compute_log_prob", DP_PROTO),
        (Actor, "update_actor", ONE_TO_ALL),
        (Critic, "compute_values", DP_PROTO),
        (Critic, "update_critic", ONE_TO_ALL),
        (Reference, "compute_ref_log_prob", DP_PROTO),
        (Reward, "compute_reward", ONE_TO_ALL),
    ],
)
def test_every_verb_carries_its_protocol(worker: type, name: str, protocol: object) -> None:
    assert getattr(worker, name).protocol is protocol
