"""The gradient is one sum: microbatches, packing, row order and mesh cannot change it."""

from dataclasses import replace
from types import SimpleNamespace

import built_workers
import jax
import numpy as np
import pytest
from called_roles import Called, Dice

from jaxrlhf import models
from jaxrlhf.algos import nll_objective, policy_objective, token_weights, value_objective
from jaxrlhf.batch import Diverged, RolloutBatch, Sequences
from jaxrlhf.batching import microbatch
from jaxrlhf.batching.ragged import Experience, RaggedBatch
from jaxrlhf.config import (
    GRPO,
    PPO,
    Arithmetic,
    Config,
    FromScratch,
    GSPOLoss,
    KLInLoss,
    KLInReward,
    Layout,
    Optimizer,
    PolicyLoss,
    Rollout,
    Sampling,
    Training,
)
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.collect import responses
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.models.attention import attention_xla
from jaxrlhf.models.attention.attention_xla import SharedTokens
from jaxrlhf.workers.pool_roles import stop_tokens

pytestmark = pytest.mark.usefixtures("programs")  # workers are built again and again of the same ones
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums in another order
ROLES = ("actor", "critic", "reference")

ALGORITHM = PPO(responses_per_update=16, policy=PolicyLoss(entropy_coefficient=0.01), kl=KLInLoss(coefficient=0.1))
POLICY, VALUE = ("advantage", "old_logp", "ref_logp"), ("returns", "old_value")
"""Fields that the objective of each role reads, beside weights."""


def config(*, layout: Layout | None = None, tokens: int = 2048, devices: int = 1, remat: str = "none") -> Config:
    layout = layout or Layout()
    trained = replace(layout, generation_stage=1, generation_tensor=1)  # a critic generates nothing
    optimizer = Optimizer(learning_rate=1e-3)
    training = Training(optimizer=optimizer, layout=layout, tokens_per_microbatch=tokens, remat=remat)
    return Config(
        name="gradient",
        model=FromScratch(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8),
        data=Arithmetic(difficulty=1, train_problems=16, eval_problems=4),
        algorithm=replace(ALGORITHM, critic=replace(training, layout=trained)),
        actor=training,
        rollout=Rollout(prompts_per_step=8, responses_per_prompt=2, max_prompt_tokens=56, max_response_tokens=16),
        steps=1,
        devices=devices,
    )


def build(settings: Config, *, roles=ROLES, tokenizer=None):
    """The builder of one pool, and the workers by role."""
    return built_workers.build(settings, *roles, tokenizer=tokenizer)


def experience(seed: int = 0, *, rows: int = 16, width: int = 72) -> Experience:
    """Random responses of many lengths, one without any trained token."""
    rng = np.random.default_rng(seed)
    length_B = rng.integers(4, width + 1, rows).astype(np.int32)
    start_B = rng.integers(1, length_B)
    position_T = np.arange(width)
    inside_BT = position_T < length_B[:, None]
    mask_BT = inside_BT & (position_T >= start_B[:, None])
    mask_BT[3] = False
    token_BT = np.where(inside_BT, rng.integers(0, 400, (rows, width)), 0).astype(np.int32)
    weight_BT = np.asarray(token_weights(mask_BT, np.arange(rows), aggregation="seq-mean-token-mean"))
    fields = {name: rng.normal(size=(rows, width)).astype(np.float32) for name in (*POLICY, *VALUE)}
    fields |= {"old_logp": fields["old_logp"] - 6, "ref_logp": fields["ref_logp"] - 6}
    fields |= {"kl_weight": 0.1 * weight_BT, "entropy_weight": 0.01 * weight_BT}
    return Experience.of(Sequences(token_BT, length_B, mask_BT, np.arange(rows)), weight_BT, fields)


def part_of(batch: Experience, names) -> Experience:
    """With some of its fields."""
    return Experience.of(batch.sequences, batch.weight_BT, {name: batch.fields[name] for name in names})


def gradients_of(workers, batch: Experience) -> list[np.ndarray]:
    """Gradients of the actor's parameters, followed by those of the critic's where there is one."""
    policy = part_of(batch, (*POLICY, "kl_weight", "entropy_weight"))
    found = [workers["actor"].gradient(policy, policy_objective, ALGORITHM)[0]]
    if "critic" in workers:
        found += [workers["critic"].gradient(part_of(batch, VALUE), value_objective, ALGORITHM.value)[0]]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.fixture(scope="module", autouse=True)
def few_sizes():
    """One size of the cache and all slots at any time, so that little of generation is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 72)
        patch.setattr("jaxrlhf.engine.buckets.FEWEST_SLOTS", 16)
        yield


@pytest.fixture(scope="module")
def one_device():
    return build(config())


@pytest.fixture(scope="module")
def plain(one_device) -> list[np.ndarray]:
    return gradients_of(one_device[1], experience())


def agree(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    assert any(np.abs(leaf).max() > 1e-3 for leaf in left)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.slow
def test_microbatch_size_packing_and_rematerialisation(plain: list[np.ndarray]) -> None:
    # Rows of one sequence's width, one row at a time.
    _, workers = build(config(tokens=72, remat="full"))
    agree(plain, gradients_of(workers, experience()))
    sequences = experience(seed=5).sequences
    np.testing.assert_allclose(
        forward_logp(workers["actor"], sequences), naive_logp(workers["actor"], sequences), atol=2e-5
    )


def test_row_order(one_device, plain: list[np.ndarray]) -> None:
    order = np.random.default_rng(1).permutation(16)
    batch = experience()
    agree(plain, gradients_of(one_device[1], replace(batch, batch=batch.batch.take(order))))


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        (Layout(fsdp=2, stage=2, tensor=2), ("actor",)),  # workers/test_lora.py has a critic in stages
        pytest.param(Layout(fsdp=4, tensor=2), ROLES, marks=pytest.mark.seeds),
        pytest.param(Layout(tensor=4, generation_tensor=2), ROLES, marks=pytest.mark.seeds),
        pytest.param(Layout(fsdp=8), ROLES, marks=pytest.mark.seeds),
        pytest.param(Layout(fsdp=2, context=4), ROLES, marks=pytest.mark.seeds),
        pytest.param(Layout(data=2, context=2, tensor=2), ROLES, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mesh(plain: list[np.ndarray], layout: Layout, roles: tuple[str, ...]) -> None:
    found = gradients_of(build(config(layout=layout, devices=8), roles=roles)[1], experience())
    agree(plain[: len(found)], found)


def test_the_first_update_of_a_rollout_has_ratio_one_and_the_sampler_agrees(one_device) -> None:
    builder, workers = one_device
    actor = workers["actor"]
    settings = replace(ALGORITHM, kl=None, policy=PolicyLoss())
    problems = load_problems(config().data, builder.on.tokenizer, split="train", max_prompt_tokens=56).problems[:8]
    rollout: RolloutBatch = actor.generate_sequences(problems, Sampling(), responses_per_prompt=2, seed=3)
    mask_BT = rollout.sequences.mask_BT
    old_logp_BT = actor.compute_log_prob(rollout)
    reference = workers["reference"].compute_ref_log_prob(rollout)
    np.testing.assert_allclose(old_logp_BT[mask_BT], rollout.sampler_logp_BT[mask_BT], atol=1e-5)
    np.testing.assert_array_equal(old_logp_BT, reference)
    assert np.all(old_logp_BT[mask_BT] < 0) and not np.any(old_logp_BT[~mask_BT])
    weight_BT = np.asarray(token_weights(mask_BT, rollout.sequences.prompt_id_B, aggregation="token-mean"))
    fields = {"advantage": np.where(mask_BT, 1.0, 0.0).astype(np.float32), "old_logp": old_logp_BT}
    metrics = actor.update_actor(
        [Experience.of(rollout.sequences, weight_BT, fields)], objective=policy_objective, settings=settings
    )
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert abs(metrics["policy/kl_old"]) < 1e-6
    assert abs(metrics["policy/kl_old_first"]) < 1e-6
    assert metrics["actor/loss"] == pytest.approx(-1, abs=1e-5)
    assert actor.version == 1
    with pytest.raises(RuntimeError, match=r"version 1, but the rollout holds responses of versions \[0\]"):
        actor.compute_log_prob(rollout)


def naive_logp(actor, sequences: Sequences) -> np.ndarray:
    """log softmax over the whole vocabulary, each sequence in a row of its own; 0 where nothing was chosen."""
    token_BT = np.asarray(sequences.token_BT)
    place_BT = np.broadcast_to(np.arange(token_BT.shape[1], dtype=np.int32), token_BT.shape)
    inside_BT = (place_BT < np.asarray(sequences.length_B)[:, None]).astype(np.int32)
    hidden = models.hidden_states(actor.params, actor.config, token_BT, place_BT, inside_BT).hidden_RWD
    logp_BTV = jax.nn.log_softmax(models.logits(actor.params, actor.config, hidden[:, :-1]))
    logp_BT = np.take_along_axis(np.asarray(logp_BTV), token_BT[:, 1:, None], axis=-1)[:, :, 0]
    return np.where(sequences.mask_BT, np.pad(logp_BT, ((0, 0), (1, 0))), 0.0)


def forward_logp(actor, sequences: Sequences) -> np.ndarray:
    rows = len(sequences.length_B)
    nothing = np.zeros(np.shape(sequences.token_BT), np.float32)
    rollout = RolloutBatch(sequences, nothing, np.zeros(rows, bool), np.full(nothing.shape, actor.version, np.int32))
    return np.asarray(actor.compute_log_prob(rollout))


def test_log_probabilities_of_packed_rows_are_those_of_each_sequence_alone(one_device) -> None:
    actor, sequences = one_device[1]["actor"], experience(seed=5).sequences
    packed = actor.pack(RaggedBatch.of(sequences))
    rows = next(packed.rows())
    assert packed.microbatches * len(rows.token_RW) < 16 and rows.segment_RW.max() > 1  # several sequences to a row
    np.testing.assert_allclose(forward_logp(actor, sequences), naive_logp(actor, sequences), atol=2e-5)


def of_prompts(batch: Experience, *, responses: int, tokens: int = 40) -> Experience:
    """The batch with sequences that begin, in groups, with the same tokens; trained after those."""
    sequences, position_T = batch.sequences, np.arange(batch.weight_BT.shape[1])
    first_B = np.arange(len(batch.weight_BT)) // responses * responses
    begins_BT = position_T < tokens
    token_BT = np.where(begins_BT, np.where(sequences.token_BT, sequences.token_BT, 7)[first_B], sequences.token_BT)
    mask_BT = (sequences.mask_BT | (position_T < np.asarray(sequences.length_B)[:, None])) & ~begins_BT
    mask_BT[3] = False
    length_B = np.maximum(sequences.length_B, tokens + 1)
    weight_BT = np.where(mask_BT, batch.weight_BT + 0.01, 0).astype(np.float32)
    return Experience.of(Sequences(token_BT, length_B, mask_BT, first_B), weight_BT, batch.fields)


def of_nobody(batch: Experience) -> Experience:
    """Return the sequences without the information that they share prompts."""
    return replace(batch, batch=replace(batch.batch, prompt_id_B=np.arange(len(batch.weight_BT))))


@pytest.fixture(scope="module")
def untrained():
    return build(config())[1]


@pytest.fixture(scope="module")
def alone(untrained) -> list[np.ndarray]:
    return gradients_of(untrained, of_nobody(of_prompts(experience(), responses=4)))


@pytest.mark.parametrize(
    "settings",
    [
        config(tokens=288, remat="full"),
        config(tokens=72),
        pytest.param(config(layout=Layout(fsdp=2, context=4), tokens=576, devices=8), marks=pytest.mark.slow),
        pytest.param(config(layout=Layout(fsdp=2, context=4), tokens=144, devices=8), marks=pytest.mark.slow),
        pytest.param(config(layout=Layout(fsdp=2, stage=2, tensor=2), tokens=576, devices=8), marks=pytest.mark.seeds),
    ],
    ids=lambda settings: f"{settings.actor.layout} {settings.actor.tokens_per_microbatch}",
)
def test_a_prompt_computed_once_is_a_prompt_computed_for_each_of_its_responses(
    untrained, alone: list[np.ndarray], settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_rows = settings.actor.tokens_per_microbatch <= 144  # with small tiles attention in rows is cheaper
    monkeypatch.setattr(microbatch, "SHARED_TILE", 4 if in_rows else 4096)
    monkeypatch.setattr(attention_xla, "SHARED_TILE", 4)
    _, workers = build(settings)
    batch = of_prompts(experience(), responses=4)
    packed, apart = (workers["actor"].pack(each.batch) for each in (batch, of_nobody(batch)))
    shared, nothing = (next(packing.rows()).shared_prefix for packing in (packed, apart))
    assert shared is not None and isinstance(shared, SharedTokens) == in_rows and nothing is None
    token = batch.batch.columns["token"]
    assert (packed.pack(token) > 0).sum() < 0.8 * (apart.pack(token) > 0).sum()
    agree(alone, gradients_of(workers, batch))
    naive_BT = naive_logp(untrained["actor"], batch.sequences)
    np.testing.assert_allclose(forward_logp(workers["actor"], batch.sequences), naive_BT, atol=2e-5)


@pytest.mark.slow
def test_the_ratio_of_a_whole_response_is_over_its_own_tokens_wherever_they_lie(one_device) -> None:
    actor = one_device[1]["actor"]
    batch = part_of(of_prompts(experience(), responses=4), ("advantage", "old_logp"))
    rows = next(actor.pack(batch.batch).rows())
    assert np.asarray(rows.segment_RW).max() > 2, "rows no longer hold several responses"
    gspo, _ = actor.gradient(batch, policy_objective, GRPO(policy=GSPOLoss(clip_low=0.1, clip_high=0.1)))

    # The same gradient is that of a sum of log-probabilities, whose weights are computed one response at a time.
    logp_BT, weight_BT = forward_logp(actor, batch.sequences), np.array(batch.weight_BT)
    advantage_BT, clipped = batch.fields["advantage"], []
    for b, mask_T in enumerate(batch.sequences.mask_BT):
        if mask_T.any():
            ratio = np.exp((logp_BT[b] - batch.fields["old_logp"][b])[mask_T].mean())
            bound_T = np.where(advantage_BT[b] > 0, ratio > 1.1, ratio < 0.9)
            weight_BT[b] *= np.where(bound_T, 0.0, advantage_BT[b] * ratio)
            clipped.append(bound_T[mask_T].mean())
    assert 0 < np.mean(clipped) < 1
    plain, _ = actor.gradient(Experience.of(batch.sequences, weight_BT, {}), nll_objective, None)
    agree(jax.tree.leaves(gspo), jax.tree.leaves(plain))


def grpo_step(one_device, algorithm: GRPO, *, gap: float = 0.0):
    """One step of one update: what it called, its gradient, the sums of its metrics, and its own metrics."""
    builder, workers = one_device
    problems = load_problems(config().data, builder.on.tokenizer, split="train", max_prompt_tokens=56).problems[:8]
    calls: list[str] = []
    actor = Called(workers["actor"], calls, gap=gap)
    roles = SimpleNamespace(actor=actor, reference=Called(workers["reference"], calls), reward=Called(Dice(), calls))
    settings = replace(config(), algorithm=algorithm)
    work = StepInput(settings, problems, 0, algorithm.initial_state())
    result = grpo.grpo(roles, work, responses(roles, work))
    return calls, [np.asarray(leaf) for leaf in jax.tree.leaves(actor.gradient)], actor.sums, result


@pytest.mark.parametrize("kl", [KLInLoss, pytest.param(KLInReward, marks=pytest.mark.slow)])
def test_an_update_without_the_old_pass_is_the_update_with_it(one_device, kl) -> None:
    # A policy that its reference is not, so that the KL terms say something.
    whole = GRPO(responses_per_update=16, kl=kl(coefficient=0.1), old_logp="trainer")
    skips = replace(whole, old_logp="sampler" if kl is KLInReward else "auto")
    with_pass, without = grpo_step(one_device, whole), grpo_step(one_device, skips)
    assert with_pass[0].count("compute_log_prob") == 1
    assert [verb for verb in with_pass[0] if verb != "compute_log_prob"] == without[0]
    scale = max(np.abs(leaf).max() for leaf in with_pass[1])
    assert scale > 1e-3
    for one, other in zip(with_pass[1], without[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1, scale))
    sums = without[2]
    assert 0 < sums.pop("sampler/logp_gap_mean") / sums["tokens"] < 1e-5
    assert sums == pytest.approx(with_pass[2], rel=1e-6, abs=1e-5 * sums["tokens"])
    before, after = with_pass[3], without[3]
    assert 0 < before.metrics["sampler/logp_gap_mean"] < 1e-5
    left_out = {name for name in before.metrics if name.startswith("sampler/")}
    assert before.metrics.keys() - after.metrics.keys() == left_out
    assert after.metrics == pytest.approx({name: before.metrics[name] for name in after.metrics}, rel=1e-4, abs=1e-6)
    assert after.logp_BT is None and before.logp_BT is not None
    _, _, sums, _ = grpo_step(one_device, skips, gap=0.01)
    assert sums["sampler/logp_gap_mean"] / sums["tokens"] == pytest.approx(0.01, rel=1e-3)


def test_where_no_token_ends_a_response_all_run_to_their_limit(one_device) -> None:
    builder, workers = one_device
    problems = load_problems(config().data, builder.on.tokenizer, split="train", max_prompt_tokens=56).problems[:8]

    def generated(actor) -> RolloutBatch:
        return actor.generate_sequences(problems, Sampling(), responses_per_prompt=2, seed=3)

    mask_BT = np.asarray((before := generated(workers["actor"])).sequences.mask_BT)
    sampled = np.asarray(before.sequences.token_BT)[mask_BT]
    ends = embedded_tokenizer()
    ends.eos_token = ends.convert_ids_to_tokens(int(np.bincount(sampled).argmax()))
    settings = config()
    endless = replace(settings, rollout=replace(settings.rollout, sampling=Sampling(ignore_eos=True)))
    assert stop_tokens(settings, ends) == (ends.eos_token_id,)
    assert stop_tokens(endless, ends) == ()
    _, after = build(endless, tokenizer=ends)
    rollout = generated(after["actor"])
    mask_BT = np.asarray(rollout.sequences.mask_BT)
    assert np.all(mask_BT.sum(axis=1) == 16) and np.all(rollout.truncated_B)
    assert ends.eos_token_id in np.asarray(rollout.sequences.token_BT)[mask_BT]


# Last, because it spoils the weights.


def test_a_gradient_that_is_not_finite_stops_the_run(one_device) -> None:
    _, workers = one_device
    batch = experience()
    infinite_BT = np.full_like(batch.weight_BT, np.inf)
    spoilt = Experience.of(batch.sequences, batch.weight_BT, {**batch.fields, "advantage": infinite_BT})
    with pytest.raises(Diverged, match="actor: gradient norms"):
        workers["actor"].update_actor([spoilt], objective=policy_objective, settings=ALGORITHM)
