"""Transfer protocols: who gets which rows, and whose results come back."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from made_steps import episodes_of, rollout_of

from jaxrlhf.batch import Problem, Sequences
from jaxrlhf.batching import transfer_protocol as protocols
from jaxrlhf.batching.ragged import Experience, MinibatchRows
from jaxrlhf.batching.transfer_protocol import (
    DP_PROTO,
    ONE_TO_ALL,
    PROTOCOLS,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PROTO,
    RankCoordinates,
    TransferProtocol,
    register,
    rows,
)
from jaxrlhf.config import Layout, Refusal, Sampling
from jaxrlhf.sharding.mesh import AXES, BATCH_AXES, SLOT_AXES, factored_mesh
from jaxrlhf.workers.actor import Actor
from jaxrlhf.workers.critic import Critic
from jaxrlhf.workers.generation.worker import RolloutWorker
from jaxrlhf.workers.reference import Reference
from jaxrlhf.workers.reward import Reward


def places(hosts: int, **layout: int) -> list[RankCoordinates]:
    """The ranks of 8 devices on `hosts` hosts, by counting along the mesh."""
    mesh = factored_mesh(Layout(**layout), jax.devices())
    sizes = dict(mesh.shape)
    every = [dict(zip(AXES, index, strict=True)) for index in itertools.product(*(range(sizes[a]) for a in AXES))]
    share = 8 // hosts
    return [RankCoordinates(rank, sizes, tuple(every[rank * share : (rank + 1) * share])) for rank in range(hosts)]


def batch(count: int) -> Sequences:
    token_BT = np.arange(count * 3).reshape(count, 3)
    return Sequences(token_BT, np.full(count, 3), token_BT > 0, np.arange(count))


def problems(count: int) -> list[Problem]:
    return [Problem(prompt_id=index, prompt=f"p{index}", prompt_tokens=(index,)) for index in range(count)]


def received(protocol: TransferProtocol, ranks: list[RankCoordinates], count: int) -> list[list[int]]:
    """Rows that each rank gets of a batch."""
    return [protocol.distribute((batch(count),), place)[0].prompt_id_B.tolist() for place in ranks]


def collected(protocol: TransferProtocol, ranks: list[RankCoordinates]) -> list[int]:
    """Ranks whose results are collected."""
    return [place.rank for place in ranks if protocol.leads(place)]


def test_a_process_knows_its_coordinates() -> None:
    place = RankCoordinates.of(factored_mesh(Layout(fsdp=2, tensor=4, generation_tensor=2), jax.devices()))
    assert place.rank == 0
    assert place.part(BATCH_AXES) == place.part(SLOT_AXES) == (0, 1), "it holds all devices"
    assert len(place.coordinates) == 8
    assert place.coordinates[5]["fsdp"] == 1
    assert place.coordinates[5]["micro_tensor"] == 1


def test_one_to_all() -> None:
    ranks = places(4, data=4, tensor=2)
    assert received(ONE_TO_ALL, ranks, 4) == [[0, 1, 2, 3]] * 4
    assert collected(ONE_TO_ALL, ranks) == [0, 1, 2, 3]
    assert ONE_TO_ALL.collect(["a", "b"]) == ["a", "b"]


def test_3d_proto_scatters_over_data_and_repeats_within_a_group() -> None:
    # Two data-parallel groups of a 2-stage, 2-tensor model; a host has the two devices of one stage.
    ranks = places(4, data=2, stage=2, tensor=2)
    assert received(THREE_D_PROTO, ranks, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert collected(THREE_D_PROTO, ranks) == [1, 3], "the last stage of each group"
    parts = [batch(2), batch(2)]
    np.testing.assert_array_equal(THREE_D_PROTO.collect(parts).prompt_id_B, [0, 1, 0, 1])


def test_3d_proto_takes_the_first_tensor_rank_where_a_group_spans_hosts() -> None:
    ranks = places(4, data=2, tensor=4)
    assert received(THREE_D_PROTO, ranks, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert collected(THREE_D_PROTO, ranks) == [0, 2]


def test_3d_all_micro_dp_scatters_over_generation_replicas() -> None:
    # Training 1-4-2 becomes four generation replicas: two micro-DP ranks in each training replica.
    ranks = places(2, data=2, tensor=4, generation_tensor=2)
    assert received(THREE_D_ALL_MICRO_DP, ranks, 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # A training replica over two hosts, generating without tensor parallelism: each device is a replica.
    apart = places(2, data=1, tensor=8, generation_tensor=1)
    assert received(THREE_D_ALL_MICRO_DP, apart, 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert received(THREE_D_PROTO, apart, 8) == [list(range(8))] * 2, "training repeats what generation scatters"
    assert collected(THREE_D_ALL_MICRO_DP, apart) == [0, 1]
    assert collected(THREE_D_PROTO, apart) == [0]
    # Four replicas of two devices that share the positions of a cache: both see the same responses.
    shared = places(8, data=4, context=2, generation_context=2)
    assert received(THREE_D_ALL_MICRO_DP, shared, 4) == [[0], [0], [1], [1], [2], [2], [3], [3]]
    assert collected(THREE_D_ALL_MICRO_DP, shared) == [0, 2, 4, 6]


def test_dp_proto_scatters_over_fsdp_too() -> None:
    ranks = places(4, data=2, fsdp=4)
    assert received(DP_PROTO, ranks, 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert collected(DP_PROTO, ranks) == [0, 1, 2, 3]
    np.testing.assert_array_equal(DP_PROTO.collect([np.arange(2), np.arange(3)]), [0, 1, 0, 1, 2])


def test_processes_that_share_no_model_are_data_parallel_ranks() -> None:
    ranks = [RankCoordinates.alone(rank, 3) for rank in range(3)]
    assert received(DP_PROTO, ranks, 6) == [[0, 1], [2, 3], [4, 5]]
    assert collected(DP_PROTO, ranks) == [0, 1, 2]


@pytest.mark.parametrize("protocol", [THREE_D_PROTO, THREE_D_ALL_MICRO_DP, DP_PROTO])
@pytest.mark.parametrize(
    ("hosts", "layout"),
    [(2, {"data": 8}), (4, {"data": 2, "fsdp": 2, "tensor": 2}), (2, {"stage": 2, "tensor": 4}), (8, {"tensor": 8})],
)
def test_what_is_scattered_and_collected_is_the_batch_again(protocol, hosts: int, layout: dict[str, int]) -> None:
    ranks = places(hosts, **({"data": None} | layout))
    count = 16
    parts = [protocol.distribute((batch(count),), place)[0] for place in ranks if protocol.leads(place)]
    np.testing.assert_array_equal(protocol.collect(parts).token_BT, batch(count).token_BT)


def test_prompts_and_their_responses_stay_together() -> None:
    # 5 prompts with 2 responses over 2 ranks: units of one prompt, 2 here and 3 there.
    (few, responses, sampling), (many, others, _) = (
        rows((problems(5), batch(10), Sampling()), part=part, parts=2) for part in (0, 1)
    )
    assert [problem.prompt_id for problem in few] == [0, 1]
    assert responses.prompt_id_B.tolist() == [0, 1, 2, 3]
    assert [problem.prompt_id for problem in many] == [2, 3, 4]
    assert others.prompt_id_B.tolist() == [4, 5, 6, 7, 8, 9]
    assert sampling == Sampling(), "what has no rows goes to every rank"


def test_minibatches_are_cut_inside_and_not_apart() -> None:
    minibatches = [Experience.of(batch(4), np.zeros((4, 3)), {"advantage": np.ones((4, 3))}) for _ in range(3)]
    (part,) = rows((minibatches,), part=1, parts=2)
    assert len(part) == 3
    assert all(experience.sequences.prompt_id_B.tolist() == [2, 3] for experience in part)
    assert part[0].fields["advantage"].shape == (2, 3)


def test_minibatches_of_unequal_rows_are_each_cut_by_themselves() -> None:
    # As forked episodes make them; some have more sequences than others.
    minibatches = [Experience.of(batch(count), np.zeros((count, 3)), {}) for count in (5, 7)]
    parts = [rows((minibatches,), part=part, parts=2)[0] for part in (0, 1)]
    found = [[one.sequences.prompt_id_B.tolist() for one in part] for part in parts]
    assert found == [[[0, 1], [0, 1, 2]], [[2, 3, 4], [3, 4, 5, 6]]]
    assert [one.weight_BT.shape for one in parts[1]] == [(3, 3), (4, 3)]
    with pytest.raises(Refusal, match="a batch of 5 rows does not split over 6 ranks"):
        rows((minibatches,), part=0, parts=6)


def test_rows_of_one_batch_are_cut_like_minibatches_of_their_own_and_without_the_rest_of_the_batch() -> None:
    rng = np.random.default_rng(0)
    length_B = rng.integers(1, 4, 12).astype(np.int32)
    inside_BT = np.arange(3) < length_B[:, None]

    def values(*shape) -> np.ndarray:
        return np.where(inside_BT[: shape[0]], rng.standard_normal(shape), 0).astype(np.float32)

    choice_BTLk = np.where(inside_BT[..., None, None], rng.integers(0, 8, (12, 3, 2, 1)), -1).astype(np.int16)
    token_BT = np.where(inside_BT, rng.integers(1, 9, (12, 3)), 0).astype(np.int32)
    whole = Sequences(token_BT, length_B, token_BT > 4, np.arange(12), recorded={"routing": choice_BTLk})
    advantage_BT, importance_BT = values(12, 3), values(12, 3)
    chosen = (*np.array_split(rng.permutation(12), 3), np.array([0, 11, 5, 4]))
    weights = tuple(np.where(inside_BT[own], rng.standard_normal((4, 3)), 0).astype(np.float32) for own in chosen)
    beyond_BT = np.where(inside_BT, advantage_BT, np.nan)  # nobody reads it, and it does not travel
    given = MinibatchRows.of(
        whole, {"advantage": beyond_BT}, chosen, weights, importance_BT=importance_BT, coefficients={"kl_weight": 0.5}
    )
    apart = [
        Experience.of(
            jax.tree.map(lambda leaf, own=own: np.asarray(leaf)[own], whole),
            weight * importance_BT[own],
            {"advantage": advantage_BT[own], "kl_weight": 0.5 * weight},
            prompts=12,
        )
        for own, weight in zip(chosen, weights, strict=True)
    ]
    for part in range(2):
        (found,), (expected,) = (rows((batches,), part=part, parts=2) for batches in (given, apart))
        assert len(found) == len(expected) == 4
        jax.tree.map(np.testing.assert_array_equal, list(found), expected)
        needed = {int(row) for own in chosen for row in own[2 * part : 2 * part + 2]}
        assert len(found.batch.prompt_id_B) == len(needed) < 12
        assert len(found.batch.columns["token"]) == length_B[sorted(needed)].sum()
    with pytest.raises(Refusal, match="a batch of 4 rows does not split over 5 ranks"):
        rows((given,), part=0, parts=5)


class Elsewhere(protocols.RemoteValue):
    """Parts of a value in other processes, and the parts that were asked for."""

    def __init__(self, value, rows) -> None:
        self.value, self._rows, self.asked = value, rows, []

    @property
    def rows(self):
        return self._rows

    def load(self):
        self.asked.append("all")
        return self.value

    def load_rows(self, start, stop):
        self.asked.append((start, stop))
        return self.value[start:stop]


def test_of_a_value_elsewhere_only_the_rows_of_the_rank_are_loaded() -> None:
    there, unknown, prompts = Elsewhere(np.arange(12), 12), Elsewhere(np.arange(6), None), np.arange(3)
    cut, other, kept = rows((there, unknown, prompts), part=1, parts=3)
    assert (cut.tolist(), other.tolist(), kept.tolist()) == ([4, 5, 6, 7], [2, 3], [1])
    assert there.asked == [(4, 8)], "what lies elsewhere is not loaded whole"
    assert unknown.asked == ["all"]


def test_arrays_of_one_length_have_rows_and_others_none() -> None:
    assert protocols.rows_of({"a": np.zeros((3, 2)), "b": np.zeros(3)}) == 3
    assert protocols.rows_of({"a": np.zeros((3, 2)), "b": np.zeros(2)}) is None
    assert protocols.rows_of({"a": np.zeros(3), "loss": 1.5}) is None
    assert protocols.rows_of({}) is None


def test_episodes_are_split_by_prompt_beside_problems_and_by_row_alone() -> None:
    """The episodes of the first prompt have three rows, and the episode of the second has one."""
    nothing_BT = np.zeros((4, 3))
    rollout = replace(rollout_of(nothing_BT, [7, 7, 7, 9]), episodes=episodes_of(nothing_BT, nothing_BT))
    problems = [Problem(number, "", (1,)) for number in (7, 9, 11)]
    parts = [rows((problems[:2], rollout), part=part, parts=2) for part in (0, 1)]
    assert [part[1].sequences.prompt_id_B.tolist() for part in parts] == [[7, 7, 7], [9]]
    assert [len(part[1].episodes.records) for part in parts] == [3, 1]
    assert rows((rollout,), part=0, parts=2)[0].sequences.prompt_id_B.tolist() == [7, 7]
    assert protocols.rows_of(rollout) is None and protocols.rows_of(replace(rollout, episodes=None)) == 4
    with pytest.raises(Refusal, match="episodes of 2 prompts and 3 rows"):
        rows((problems, rollout), part=0, parts=3)


def test_numbers_are_taken_from_the_first_rank() -> None:
    assert protocols.join([{"loss": 1.5}, {"loss": 1.5}]) == {"loss": 1.5}


def test_fewer_rows_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="batch of 1 rows does not split over 2 ranks"):
        rows((batch(1),), part=0, parts=2)


def test_batches_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 6\] rows; the smallest"):
        rows((batch(4), batch(6)), part=0, parts=2)


def test_a_host_that_cuts_a_data_parallel_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host 1 hold parts \[1, 2\] of 4 .*change the layout"):
        RankCoordinates(1, {"data": 4}, ({"data": 1}, {"data": 2})).part(("data",))


def test_a_protocol_of_ones_own() -> None:
    def reverse(arguments, place):
        return tuple(argument[::-1] for argument in arguments)

    mine = register(TransferProtocol("REVERSED", reverse, lambda place: place.rank == 0, lambda results: results[0]))
    try:
        assert PROTOCOLS["REVERSED"] is mine
        assert mine.distribute(([1, 2],), RankCoordinates.alone(0, 1)) == ([2, 1],)
        with pytest.raises(ValueError, match="protocol 'REVERSED' already"):
            register(mine)
    finally:
        del PROTOCOLS["REVERSED"]
    assert set(PROTOCOLS) == {"ONE_TO_ALL", "3D_PROTO", "3D_ALL_MICRO_DP", "DP_PROTO"}


@pytest.mark.parametrize(
    ("worker", "name", "protocol"),
    [
        (Actor, "generate_sequences", THREE_D_ALL_MICRO_DP),
        (RolloutWorker, "generate_sequences", THREE_D_ALL_MICRO_DP),
        (Actor, "compute_log_prob", THREE_D_PROTO),
        (Actor, "update_actor", THREE_D_PROTO),
        (Actor, "offer_weights", ONE_TO_ALL),
        (Critic, "compute_values", THREE_D_PROTO),
        (Critic, "update_critic", THREE_D_PROTO),
        (Reference, "compute_ref_log_prob", THREE_D_PROTO),
        (Reward, "compute_reward", DP_PROTO),
    ],
)
def test_every_worker_method_carries_its_protocol(worker: type, name: str, protocol: object) -> None:
    assert getattr(worker, name).protocol is protocol
