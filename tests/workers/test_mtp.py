"""Training of the layer that predicts the second next token: its own loss, which moves nothing else."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from built_workers import builder_of, of_many_lengths, weighted

from jaxrlhf import models
from jaxrlhf.algos import nll_objective
from jaxrlhf.config import SFT, Arithmetic, Config, FromScratch, Lora, Optimizer, Rollout, Training
from jaxrlhf.models import from_config
from jaxrlhf.models.attention.attention import Segments
from jaxrlhf.models.mtp.layer import mtp_rows
from jaxrlhf.models.rope import rotations
from jaxrlhf.workers.build import Phase
from jaxrlhf.workers.summary import pool_rows

pytestmark = pytest.mark.usefixtures("programs")

WIDTH = 72
SETTINGS = SFT(examples_per_update=16)


def built(*, has_mtp=True, **training):
    scratch = from_config.scratch_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            from_config,
            "scratch_config",
            lambda *_, **how: replace(scratch(*_, **how), mtp="output" if has_mtp else None),
        )
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
        settings = Config(
            name="mtp",
            model=FromScratch(**sizes, head_dim=8),
            data=Arithmetic(difficulty=1, train_problems=16, eval_problems=4),
            algorithm=SETTINGS,
            actor=Training(tokens_per_microbatch=2048, remat="none", **training),
            rollout=Rollout(max_prompt_tokens=56, max_response_tokens=16),
            steps=1,
            devices=1,
        )
        return builder_of(settings, ["actor"])


def actor(**training):
    builder = built(**training)
    return builder.workers(Phase(builder.config, ("actor",), total_updates=1))["actor"]


def sequences():
    """Sequences of many lengths; the last four share the prompts of the first four, stored once."""
    made = of_many_lengths(np.random.default_rng(0), rows=8, width=WIDTH, shortest=12)
    begin_B = np.asarray(made.mask_BT).argmax(axis=1)
    token_BT, mask_BT, length_B = (np.array(each) for each in (made.token_BT, made.mask_BT, made.length_B))
    for row in range(4, 8):
        begin = begin_B[row - 4]
        length_B[row] = max(length_B[row], begin + 2)
        token_BT[row, :begin] = token_BT[row - 4, :begin]
        mask_BT[row] = (np.arange(WIDTH) >= begin) & (np.arange(WIDTH) < length_B[row])
        token_BT[row, length_B[row] :] = 0
    return replace(made, token_BT=token_BT, mask_BT=mask_BT, length_B=length_B, prompt_id_B=np.tile(np.arange(4), 2))


def gradient(worker):
    found, sums = worker.gradient(weighted(sequences()), nll_objective, SETTINGS)
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(found)}
    return leaves, {name: sum(float(part[name]) for part in sums) for name in sums[0]}


def test_the_loss_is_that_of_whole_sequences_and_moves_the_layer_alone():
    worker, still = actor(mtp_loss=0.5), actor(mtp_loss=0.0)
    (with_loss, sums), (without, plain) = gradient(worker), gradient(still)
    params, config, given = worker.params, worker.config, sequences()
    place_BT = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), given.token_BT.shape)
    inside_BT = (place_BT < given.length_B[:, None]).astype(np.int32)
    hidden_BTD = models.hidden_states(params, config, given.token_BT, place_BT, inside_BT).hidden_RWD
    next_BT = np.roll(given.token_BT, -1, axis=1)
    begin_B = given.mask_BT.argmax(axis=1)
    next_BT[np.arange(8), begin_B - 1] = -1  # the first token of a response is not known when its prompt is run
    turn = rotations(config, place_BT)
    further_BTD, _ = mtp_rows(params, config, hidden_BTD, next_BT, turn, Segments(inside_BT), models.ONE_DEVICE)
    logp_BTV = jax.nn.log_softmax(models.logits(params, config, further_BTD))
    total = 0.0
    for row in range(8):
        for at in np.flatnonzero(given.mask_BT[row]):
            if at > begin_B[row] + 1:
                total -= float(logp_BTV[row, at - 2, given.token_BT[row, at]])
    assert sums["mtp/actor_loss"] == pytest.approx(total, rel=1e-4)
    assert sums["loss"] - plain["loss"] == pytest.approx(0.5 * total / sums["tokens"], rel=1e-4)
    for name, leaf in with_loss.items():
        if name.startswith("['mtp']"):
            assert np.abs(leaf).max() > 1e-6 and not without[name].any()
        else:
            np.testing.assert_array_equal(leaf, without[name], err_msg=name)


def test_the_layer_does_not_shorten_the_policys_gradient():
    """With a norm as small as this, both gradients are cut."""
    settings = Optimizer(learning_rate=1.0, max_grad_norm=1e-3, factory="optax:sgd")
    worker, still = actor(mtp_loss=100.0, optimizer=settings), actor(mtp_loss=0.0, optimizer=settings)
    norms = [
        each.update([weighted(sequences())], nll_objective, SETTINGS).metrics["actor/grad_norm"]
        for each in (worker, still)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    moved, kept = worker.params, still.params
    np.testing.assert_array_equal(np.asarray(moved["embed"]), np.asarray(kept["embed"]))
    assert np.abs(np.asarray(moved["mtp"]["join"]) - np.asarray(kept["mtp"]["join"])).max() > 1e-7


def test_a_coefficient_without_the_layer_is_refused():
    for how in ({"has_mtp": False}, {"lora": Lora(rank=2)}):
        with pytest.raises(ValueError, match=r"actor\.mtp_loss=0\.5 trains the layer"):
            pool_rows(built(mtp_loss=0.5, **how))
