"""An episode weighs the same in one row and in several: its gradient, through packing and shared beginnings."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrlhf.algos import policy_objective
from jaxrlhf.batch import EpisodeRows, RolloutBatch, Sequences
from jaxrlhf.dataflows.batches.episode_rows import side_by_side
from jaxrlhf.dataflows.batches.minibatches import minibatches
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.episode import EpisodeRecord
from tests.workers.test_gradient import ALGORITHM, POLICY, agree, build, config

pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture(scope="module")
def actor():
    return build(config(), roles=("actor",))[1]["actor"]


def episodes(*, split: bool) -> tuple[RolloutBatch, dict[str, np.ndarray]]:
    """Six episodes of one to four turns of six tokens, and what their loss reads: an episode a row, or a turn a row.

    A turn's row holds all that was said before it, and trains its own tokens alone.
    """
    rng, turns = np.random.default_rng(7), (4, 1, 3, 2, 4, 1)
    token_ET = rng.integers(1, 400, (6, 72)).astype(np.int32)
    fields = {name: rng.normal(size=(6, 72)).astype(np.float32) for name in POLICY}
    fields |= {"old_logp": fields["old_logp"] - 6, "ref_logp": fields["ref_logp"] - 6}
    turn_T = np.where(np.arange(72) % 15 >= 9, np.arange(72) // 15, -1)  # nine tokens are said, six are sampled
    rows = [
        (episode, own)
        for episode, count in enumerate(turns)
        for own in ([[turn] for turn in range(count)] if split else [list(range(count))])
    ]
    episode_B = np.array([episode for episode, _ in rows])
    length_B = np.array([15 * (own[-1] + 1) for _, own in rows], np.int32)
    mask_BT = np.array([np.isin(turn_T, own) for _, own in rows])
    token_BT = np.where(np.arange(72) < length_B[:, None], token_ET[episode_B], 0)
    turn_BT, nothing = np.where(mask_BT, turn_T, -1).astype(np.int16), np.zeros(mask_BT.shape, np.float32)
    record_B = np.full(len(rows), EpisodeRecord([], [], "done"), object)
    about = EpisodeRows(episode_B, turn_BT, nothing, np.zeros(mask_BT.shape, np.int64), record_B)
    sequences = Sequences(token_BT, length_B, mask_BT, episode_B // 2)
    rollout = RolloutBatch(sequences, nothing, np.zeros(len(rows), bool), np.zeros(mask_BT.shape, np.int32), about)
    return rollout, {name: np.where(mask_BT, field_ET[episode_B], 0) for name, field_ET in fields.items()}


@pytest.mark.parametrize(
    "aggregation", [pytest.param("token-mean", marks=pytest.mark.seeds), "seq-mean-token-mean"]
)  # a sequence is an episode
def test_an_episode_in_one_row_has_the_gradient_of_a_row_for_each_turn(actor, aggregation):
    rollout = replace(config().rollout, prompts_per_step=3)
    settings = replace(config(), algorithm=replace(config().algorithm, responses_per_update=6), rollout=rollout)
    how = {"aggregation": aggregation, "kl_coefficient": 0.1, "entropy_coefficient": 0.01}
    found = []
    for split in (False, True):
        rollout, fields = episodes(split=split)
        whole, *values = side_by_side(rollout, tuple(fields.values()))
        named = dict(zip(fields, values, strict=True))
        [batch] = minibatches(StepInput(settings, [], 0, {}), whole.sequences, named, **how)
        assert len(batch.weight_BT) == (15 if split else 6) and batch.sequences.mask_BT.sum() == 15 * 6
        gradient, _ = actor.gradient(batch, policy_objective, ALGORITHM)
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(gradient)])
    agree(*found)
