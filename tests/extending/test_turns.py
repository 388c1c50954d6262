"""An environment of two turns in a user's file: what was sampled is trained on as it was sampled, the rest is not."""

from pathlib import Path

import numpy as np
import pytest
import two_turns
from tiny_runs import records

import jaxrlhf
from jaxrlhf.batch import RolloutBatch, Sequences
from jaxrlhf.config import override

FILE = Path(__file__).parents[1] / "support" / "two_turns.py"


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_run_learns_from_two_turns(tmp_path):
    jaxrlhf.run(override(jaxrlhf.load(FILE), {"workdir": str(tmp_path)}))
    steps = [record for record in records(tmp_path / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2]
    # The trainer reads both answers where they were sampled: behind the prompt, and behind what was said.
    assert all(record["sampler/logp_gap_max"] < 1e-5 for record in steps)
    # Of two answers of at most 8 tokens each, and none of what was said.
    assert all(16 * 8 < record["actor/tokens"] <= 16 * 16 for record in steps)


def test_what_the_environment_said_is_in_the_sequence_and_not_trained_on():
    tokens = [1, 2, 31, 32, *two_turns.SAID, 41, 42, 0]

    def rollout(length, sampled, prompt_id, version):
        mask_BT = np.isin(np.arange(10), sampled)[None]
        token_BT = np.where(np.arange(10) < length, tokens, 0)[None].astype(np.int32)
        sequences = Sequences(token_BT, np.array([length], np.int32), mask_BT, np.array([prompt_id]))
        logp_BT = np.where(mask_BT, -prompt_id, 0.0)
        return RolloutBatch(sequences, logp_BT, np.zeros(1, bool), np.where(mask_BT, version, -1))

    both = two_turns.joined(rollout(4, (2, 3), 7, version=4), rollout(9, (7, 8), 1, version=5))
    assert both.sequences.token_BT.tolist() == [tokens]
    assert np.flatnonzero(both.sequences.mask_BT).tolist() == [2, 3, 7, 8]
    assert both.sampler_logp_BT[0].tolist() == [0, 0, -7, -7, 0, 0, 0, -1, -1, 0]
    assert both.version_BT[0].tolist() == [-1, -1, 4, 4, -1, -1, -1, 5, 5, -1]
    assert both.sequences.prompt_id_B.tolist() == [7]
