"""Learning from pairs: the gradient is the loss's own, a reward model is exported, what does not fit is refused."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from tiny_runs import training

from jaxrlhf import models
from jaxrlhf.algos import PairSettings, pair_objective
from jaxrlhf.config import (
    DPO,
    IPO,
    RPO,
    Arithmetic,
    ArithmeticPairs,
    ColdStart,
    Config,
    CostModel,
    FormatReward,
    Layout,
    PairFile,
    RewardModel,
    Rewards,
    Sampling,
    Training,
    checked,
)
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.dataflows import dpo
from jaxrlhf.dataflows import reward_model as reward_model_dataflow
from jaxrlhf.dataflows.batches import preference_pairs
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.problem import question_of
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.trainer.policy import evaluate_policy, export_policy
from jaxrlhf.trainer.run import run
from jaxrlhf.workers.build import Builder, Phase
from jaxrlhf.workers.score_model import ScoreModel

PAIRS = ArithmeticPairs(difficulty=1, train_problems=60, eval_problems=20)


def config(algorithm, **changes) -> Config:
    own = {"actor": Training()} if isinstance(algorithm, RewardModel) else {}
    settings = {"name": "pairs", "data": PAIRS, "rewards": Rewards(), "cold_start": None, "algorithm": algorithm}
    given = {**settings, **own, **changes}
    given.setdefault("rollout", replace(tiny_runs.get_config().rollout, max_response_tokens=24))
    return replace(tiny_runs.get_config(), **given)


def reward_model(kind=RewardModel) -> RewardModel:
    return kind(pairs_per_update=8, critic=training())


def moved(worker) -> None:
    """Away from where it starts, at which policy and reference agree and all scores are 0."""
    keys = iter(jax.random.split(jax.random.key(0), 99))
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(next(keys), x.shape), worker.params)
    worker.parameters.tree = jax.device_put(params, jax.tree.map(lambda x: x.sharding, worker.params))


def workers_of(settings: Config):
    pool = ResourcePool("all", tuple(jax.devices()[: settings.devices]))
    roles = tuple(settings.roles)
    builder = Builder(settings, embedded_tokenizer(), pool, roles, progress=lambda *_: None)
    return builder.workers(Phase(settings, roles, total_updates=1))


def pairs_of(settings: Config):
    tokens = {"max_prompt_tokens": 64, "max_solution_tokens": 23}
    return load_problems(settings.data, embedded_tokenizer(), split="train", **tokens).problems[:8]


def hidden(params, worker, sequences):
    """Each sequence in a row of its own."""
    token_BT = jnp.asarray(sequences.token_BT)
    place_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
    inside_BT = (place_BT < jnp.asarray(sequences.length_B)[:, None]).astype(jnp.int32)
    return models.hidden_states(params, worker.config, token_BT, place_BT, inside_BT).hidden_RWD


def answer_logp(params, worker, sequences, pairs):
    """Log-probabilities of chosen and rejected answers in turn, by log softmax over the whole vocabulary."""
    logits = models.logits(params, worker.config, hidden(params, worker, sequences)[:, :-1])
    logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits), sequences.token_BT[:, 1:, None], axis=-1)[:, :, 0]
    ends = [(len(pair.prompt_tokens), len(answer)) for pair, answer in answers_of(pairs)]
    return jnp.stack([logp_BT[row, start - 1 : start - 1 + count].sum() for row, (start, count) in enumerate(ends)])


def answers_of(pairs):
    return [(pair, answer) for pair in pairs for answer in (pair.solution_tokens, pair.rejected_tokens)]


def log_sigmoid(x):
    return -jnp.log1p(jnp.exp(-x))


PAIR_LOSS = "preference/loss"
POLICY = {
    DPO(beta=0.3, label_smoothing=0.1): lambda c, r, logp, n: (
        -0.9 * log_sigmoid(0.3 * (c - r)) - 0.1 * log_sigmoid(0.3 * (r - c))
    ),
    RPO(beta=0.3, nll_coefficient=0.7): lambda c, r, logp, n: -log_sigmoid(0.3 * (c - r)) - 0.7 * logp / n,
    IPO(beta=0.3): lambda c, r, logp, n: (c - r - 1 / 0.6) ** 2,
}
SCORES = {
    RewardModel: lambda c, r: -log_sigmoid(c - r),
    CostModel: lambda c, r: -log_sigmoid(r - c) - log_sigmoid(-c) - log_sigmoid(r),
}


def value_and_gradients(losses, params):
    """Several losses, and what gives the gradient of each; compiled once."""

    def one(params, chosen):
        values = losses(params)
        return values[chosen], values

    program = jax.jit(jax.value_and_grad(one, has_aux=True))
    (_, values), _ = program(params, 0)
    return values, lambda index: program(params, index)[1]


def assert_same(worker, batch, settings, loss, written) -> None:
    """The update's gradient and the losses that it reports are those of the loss as written."""
    ours, sums = worker.gradient(batch, pair_objective, settings)
    tokens, total, reported = (sum(float(part[name]) for part in sums) for name in ("tokens", "loss", PAIR_LOSS))
    np.testing.assert_allclose([total, reported / tokens], loss, rtol=1e-4)
    assert any(np.abs(leaf).max() > 1e-2 for leaf in jax.tree.leaves(written))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), ours, written)


@pytest.mark.slow
def test_updates_of_the_policy_follow_the_gradients_of_the_losses_as_written():
    # The rollout's temperature is for sampling alone.
    sampled = replace(tiny_runs.get_config().rollout, max_response_tokens=24, sampling=Sampling(temperature=0.5))
    settings = config(DPO(), rollout=sampled)
    workers, pairs = workers_of(settings), pairs_of(settings)
    actor, reference = workers["actor"], workers["reference"]
    moved(actor)
    sequences = preference_pairs.pair_sequences(pairs, settings)
    tokens_P = jnp.array([len(pair.solution_tokens) for pair in pairs])

    def written(params):
        logp_B = answer_logp(params, actor, sequences, pairs)
        ratio_B = logp_B - answer_logp(reference.params, reference, sequences, pairs)
        return jnp.stack([loss(ratio_B[::2], ratio_B[1::2], logp_B[::2], tokens_P).mean() for loss in POLICY.values()])

    losses, gradient = value_and_gradients(written, actor.params)
    logp_BT = actor.compute_log_prob(sequences, temperature=1.0)
    ref_logp_BT = reference.compute_ref_log_prob(sequences, temperature=1.0)
    for index, algorithm in enumerate(POLICY):
        judged = dpo.judged(algorithm, sequences, logp_BT, ref_logp_BT)
        assert judged.metrics[PAIR_LOSS].mean() == pytest.approx(float(losses[index]), rel=1e-4)
        batch = preference_pairs.pair_experience(sequences, dpo.loss_fields(algorithm, sequences, ref_logp_BT, 0.0))
        settings = PairSettings(dpo.implicit_rewards, algorithm, len(pairs))
        assert_same(actor, batch, settings, losses[index], gradient(index))


@pytest.mark.slow
def test_updates_of_score_models_follow_the_gradients_of_the_losses_as_written():
    settings = config(reward_model())
    critic, pairs = workers_of(settings)["critic"], pairs_of(settings)
    moved(critic)
    sequences = preference_pairs.pair_sequences(pairs, settings)
    last_B = np.array([len(pair.prompt_tokens) + len(answer) - 1 for pair, answer in answers_of(pairs)])

    def written(params):
        score_B = hidden(params, critic, sequences)[jnp.arange(16), last_B] @ params["head"]
        return jnp.stack([loss(score_B[::2], score_B[1::2]).mean() for loss in SCORES.values()])

    losses, gradient = value_and_gradients(written, critic.params)
    value_BT = critic.compute_values(sequences)
    for index, kind in enumerate(SCORES):
        algorithm = reward_model(kind)
        judged = reward_model_dataflow.judged(algorithm, pairs, sequences, value_BT)
        assert judged.metrics[PAIR_LOSS].mean() == pytest.approx(float(losses[index]), rel=1e-4)
        fields = reward_model_dataflow.loss_fields(algorithm, pairs, sequences)
        how = PairSettings(reward_model_dataflow.pair_rewards, algorithm, len(pairs))
        batch = preference_pairs.pair_experience(sequences, fields)
        assert_same(critic, batch, how, losses[index], gradient(index))


@pytest.mark.slow
def test_updates_on_pairs_are_the_same_on_eight_devices():
    layouts = {"alone": (Layout(), 1), "eight": (Layout(fsdp=2, stage=2, tensor=2), 8)}
    gradients = {}
    for name, (layout, devices) in layouts.items():
        actor = replace(training(), layout=layout, tokens_per_microbatch=4096)
        settings = checked(config(DPO(pairs_per_update=8), actor=actor, devices=devices))
        worker, pairs = workers_of(settings)["actor"], pairs_of(settings)
        sequences = preference_pairs.pair_sequences(pairs, settings)
        ref_logp_BT = np.where(sequences.mask_BT, np.float32(-3.0), 0)
        batch = preference_pairs.pair_experience(
            sequences, dpo.loss_fields(settings.algorithm, sequences, ref_logp_BT, 0.0)
        )
        how = PairSettings(dpo.implicit_rewards, settings.algorithm, len(pairs))
        found, sums = worker.gradient(batch, pair_objective, how)
        gradients[name] = jax.tree.map(np.asarray, found), sum(float(part["loss"]) for part in sums)
    assert gradients["eight"][1] == pytest.approx(gradients["alone"][1], rel=1e-5)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradients["alone"][0]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6),
        gradients["eight"][0],
        gradients["alone"][0],
    )


def test_a_margin_is_asked_of_the_pair_that_names_it(tmp_path):
    lines = [{"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": m} for m in (0.0, 4.0)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = config(reward_model(), data=PairFile(str(path), margin_key="margin"))
    pairs = pairs_of(settings)
    sequences = preference_pairs.pair_sequences(pairs, settings)
    values = np.zeros(sequences.token_BT.shape, np.float32)
    judged = reward_model_dataflow.judged(settings.algorithm, pairs, sequences, values)
    np.testing.assert_allclose(judged.loss_P, np.log1p(np.exp([0.0, 4.0])), rtol=1e-6)
    assert judged.metrics["preference/accuracy"].tolist() == [0.5, 0.5]  # all scores are equal


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_reward_model_is_exported_as_what_scores_texts(tmp_path):
    settings = config(reward_model(), steps=2, workdir=str(tmp_path / "run"))
    run(settings)
    assert export_policy(tmp_path / "run", tmp_path / "judge") == 2
    with pytest.raises(ValueError, match="trained no policy"):
        evaluate_policy(config(DPO()), policy=str(tmp_path / "run"), samples=1, show=0)
    with pytest.raises(ValueError, match="RewardModel trains no policy"):
        evaluate_policy(settings, policy=None, samples=1, show=0)

    mesh = factored_mesh(Layout(), jax.devices()[:1])
    judge = ScoreModel(str(tmp_path / "judge"), mesh=mesh, dtype=jnp.dtype("float32"))
    pairs, tokenizer = pairs_of(settings), embedded_tokenizer()
    texts = [
        (pair.prompt, tokenizer.decode(ids[:-1]), True)
        for pair in pairs
        for ids in (pair.solution_tokens, pair.rejected_tokens)
    ]
    critic = workers_of(settings)["critic"]
    folder = tmp_path / "run/checkpoints/step_2/critic"
    critic.items()["critic"].restore(folder)
    sequences = preference_pairs.pair_sequences(pairs, settings)
    value_BT = critic.compute_values(sequences)
    np.testing.assert_allclose(judge.score(texts), value_BT[sequences.mask_BT], atol=1e-5)
    assert np.abs(value_BT[sequences.mask_BT]).max() > 1e-4


def test_a_microbatch_that_does_not_hold_a_pair_is_refused_before_anything_is_compiled():
    longest = tiny_runs.get_config().rollout.max_prompt_tokens + 24
    actor = replace(training(), tokens_per_microbatch=2 * longest - 1)
    with pytest.raises(ValueError, match=f"is below 2 of the longest sequences, each .* at least {2 * longest}, or"):
        checked(config(DPO(pairs_per_update=8), actor=actor))
    # On two devices each has a row.
    settings = config(DPO(), actor=replace(actor, tokens_per_microbatch=2 * longest, layout=Layout(data=2)), devices=2)
    with pytest.raises(ValueError, match=f"does not hold a row of {2 * longest} tokens on each of 2 data-parallel"):
        workers_of(settings)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: replace(c, data=Arithmetic()), "RewardModel learns from preference pairs, but data is Arithmetic"),
        (lambda c: replace(c, rewards=Rewards(parts=(FormatReward(),))), "does not use rewards"),
        (lambda c: replace(c, actor=training()), "RewardModel has no actor"),
        (
            lambda c: replace(c, cold_start=ColdStart(steps=1)),
            "cold_start trains a policy, but RewardModel has no policy",
        ),
        (
            lambda c: replace(c, algorithm=reward_model(CostModel), data=PairFile("pairs.jsonl")),
            r"CostModel reads labels of harmless answers, but data\.safe_keys is None",
        ),
    ],
)
def test_what_does_not_fit_pairs_is_refused(change, told):
    with pytest.raises(ValueError, match=told):
        checked(change(config(reward_model())))


def test_a_plan_counts_both_answers_and_the_passes_before_an_update():
    for algorithm, passes in ((DPO(pairs_per_update=8), {"actor": 0, "reference": 1}), (reward_model(), {"critic": 0})):
        problem = question_of(config(algorithm), hardware_of(config(algorithm), "a100x1x8"), vocabulary=500).problem
        assert {role.name: role.passes for role in problem.roles} == passes
        assert problem.workload.responses == 16
