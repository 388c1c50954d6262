"""Roles that train adapters: what is trained, what is held, and that layouts change nothing."""

import gc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from built_workers import build, halves, weighted
from made_plans import machines
from tiny_runs import get_config, training
from unit_machines import DENSE, UNIT, WORK

from jaxrlhf.algos import policy_objective, value_objective
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import Config, FromScratch, Layout, Lora, Sampling, ValueLoss, checked
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.models import scratch_config
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.lora.lora import adapter_shapes
from jaxrlhf.planner.cost.memory import weights_trained
from jaxrlhf.planner.cost.simulate import Simulator
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.problem import question_of
from jaxrlhf.planner.workload import Role, Software
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.sharding.rules import shard_bytes
from jaxrlhf.tracking import bytes_in_use
from jaxrlhf.workers.role_weights import RoleWeights

pytestmark = pytest.mark.usefixtures("programs")

LORA = Lora(rank=2, alpha=4.0)


def config_of(*, lora: Lora | None = LORA, devices: int = 1, dtype: str = "float32", **layout: int) -> Config:
    config = get_config()
    own = training(**{name: size for name, size in layout.items() if not name.startswith("generation")})
    return replace(
        config,
        devices=devices,
        compute_dtype=dtype,
        actor=replace(training(**layout), lora=lora),
        algorithm=replace(config.algorithm, critic=replace(own, lora=lora)),
        cold_start=None,
    )


def actor_and_reference(config: Config) -> tuple[dict, int]:
    """The workers of one device, and the bytes that it has in use for them."""
    gc.collect()
    [before] = bytes_in_use(jax.devices()[:1])
    workers = build(config, "actor", "reference")[1]
    gc.collect()
    [after] = bytes_in_use(jax.devices()[:1])
    return workers, after - before


def experience(rows: int = 8, width: int = 80) -> Experience:
    rng = np.random.default_rng(0)
    sequences, noise_BT = halves(rng, rows=rows, width=width), rng.normal(size=(rows, width)).astype(np.float32)
    return weighted(sequences, {"advantage": noise_BT, "old_logp": np.full_like(noise_BT, -6.0)})


def values_of(batch: Experience) -> Experience:
    zeros_BT = np.zeros_like(batch.weight_BT)
    fields = {"returns": batch.fields["advantage"], "old_value": zeros_BT}
    return Experience.of(batch.sequences, batch.weight_BT, fields)


def spread(workers) -> None:
    """Adapters as they are after some training: the same on any devices, and nowhere zero."""
    rng = np.random.default_rng(3)
    for worker in workers:
        sampled = jax.tree.map(
            lambda leaf: jax.device_put(0.2 * rng.standard_normal(leaf.shape, np.float32), leaf.sharding),
            worker.adapters.tree,
        )
        worker.adapters.tree = sampled


def gradients(workers) -> list[np.ndarray]:
    """Gradients of the actor's parameters, and those of the critic's where there is one."""
    spread(workers.values())
    batch, settings = experience(), replace(get_config().algorithm, kl=None)
    found = [workers["actor"].gradient(batch, policy_objective, settings)[0]]
    if "critic" in workers:
        found += [workers["critic"].gradient(values_of(batch), value_objective, ValueLoss())[0]]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def kinds_of_memory(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def on_host(tree) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def equal(left, right) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def built() -> tuple[dict, int]:
    return actor_and_reference(config_of())


@pytest.fixture(scope="module")
def plain() -> list[np.ndarray]:
    return gradients(build(config_of(), "actor", "critic")[1])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(fsdp=2, stage=2, tensor=2), marks=pytest.mark.slow),
        pytest.param(Layout(fsdp=4, tensor=2), marks=pytest.mark.seeds),
    ],
    ids=str,
)
def test_gradients_on_eight_devices_are_those_of_one(plain, layout):
    sizes = {name: getattr(layout, name) for name in ("fsdp", "stage", "tensor")}
    _, workers = build(config_of(devices=8, **sizes), "actor", "critic")
    adapter = workers["actor"].adapters.tree["layers"]["attention"]["output"]
    assert adapter.down.sharding.shard_shape(adapter.down.shape) == (2 // layout.stage, 4 // layout.tensor, 8, 2)
    assert adapter.up.sharding.shard_shape(adapter.up.shape) == (2 // layout.stage, 2, 32 // layout.fsdp)
    others = gradients(workers)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in plain)
    for one, other in zip(plain, others, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_the_reference_is_the_actor_before_it_learnt_and_holds_no_bytes(built):
    workers, grown = built
    actor, reference, sequences = workers["actor"], workers["reference"], experience().sequences
    assert grown == sum(leaf.nbytes for leaf in jax.tree.leaves([held.tree for held in actor.trees.values()])) > 100_000
    actor.adapters.tree = jax.tree.map(jnp.zeros_like, actor.adapters.tree)
    base = np.asarray(actor.compute_log_prob(sequences))
    assert np.array_equal(reference.compute_ref_log_prob(sequences), base)
    spread([actor])
    assert np.array_equal(reference.compute_ref_log_prob(sequences), base)
    assert np.abs(actor.compute_log_prob(sequences) - base).max() > 0.01


def test_the_search_counts_the_bytes_that_actor_and_reference_hold(built):
    tokens = len(embedded_tokenizer())
    problem = question_of(config_of(), machines(), vocabulary=tokens).problem
    assert "reference" not in {role.name for role in problem.roles}
    [actor] = [role for role in problem.roles if role.name == "actor"]
    held = Simulator(problem).role(replace(actor, remat=True), Layout(1), 1, (), generates=True).idle_bytes
    # The moments come with the first update.
    moments = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(built[0]["actor"].adapters.tree))
    assert held == pytest.approx(built[1] + moments, rel=1e-3)


def assert_only_adapters_learn(worker, update) -> None:
    frozen, adapters = on_host(worker.parameters.tree), on_host(worker.adapters.tree)
    update()
    assert equal(on_host(worker.parameters.tree), frozen)
    assert not any(np.array_equal(*pair) for pair in zip(on_host(worker.adapters.tree), adapters, strict=True))
    moments = sum(leaf.size for leaf in jax.tree.leaves(worker.optimizer.tree) if leaf.ndim)
    assert moments == 2 * sum(leaf.size for leaf in adapters)


@pytest.mark.slow
def test_an_update_changes_adapters_alone(built):
    actor, settings = built[0]["actor"], replace(get_config().algorithm, kl=None)
    spread([actor])
    batch = [experience()]
    assert_only_adapters_learn(actor, lambda: actor.update_actor(batch, objective=policy_objective, settings=settings))
    assert set(actor.items()) == {"actor_adapters", "actor_optimizer"}


@pytest.mark.seeds
def test_a_critic_learns_adapters_and_the_whole_value_head():
    critic = build(config_of(), "critic")[1]["critic"]
    spread([critic])
    batch = [values_of(experience())]
    assert_only_adapters_learn(
        critic, lambda: critic.update_critic(batch, objective=value_objective, settings=ValueLoss())
    )
    assert "['head']" in critic.items()["critic_adapters"].describe()
    assert "head" not in critic.parameters.tree


@pytest.mark.slow
def test_what_is_sampled_has_the_log_probabilities_that_are_trained_on():
    config = config_of(devices=8, fsdp=2, stage=2, tensor=2, generation_tensor=2)
    builder, workers = build(config, "actor")
    actor = workers["actor"]
    spread([actor])
    problems = load_problems(config.data, builder.on.tokenizer, split="train", max_prompt_tokens=64).problems[:8]
    before = on_host(actor.params)
    rollout = actor.generate_sequences(problems, Sampling(), responses_per_prompt=2, seed=3)
    assert equal(on_host(actor.params), before)
    mask_BT = rollout.sequences.mask_BT
    trained_BT = np.asarray(actor.compute_log_prob(rollout))
    np.testing.assert_allclose(rollout.sampler_logp_BT[mask_BT], trained_BT[mask_BT], atol=1e-5)
    alone_BT = np.asarray(actor.log_prob(rollout.sequences, adapters={}))
    assert np.abs(alone_BT - trained_BT).max() > 0.1, "the adapters change nothing"


@pytest.mark.slow
def test_weights_are_held_once_in_the_compute_dtype_and_shared_with_generation():
    builder, workers = build(config_of(dtype="bfloat16"), "actor")
    actor = workers["actor"]
    for path, leaf in jax.tree.leaves_with_path(actor.parameters.tree):
        assert leaf.dtype == (jnp.float32 if "norm" in str(path) else jnp.bfloat16) or "bias" in str(path)
    assert {leaf.dtype for leaf in jax.tree.leaves(actor.adapters.tree)} == {jnp.dtype("float32")}
    adapters = sum(leaf.size for leaf in jax.tree.leaves(actor.adapters.tree))
    gc.collect()
    [idle] = bytes_in_use(jax.devices()[:1])
    with actor.generating():
        assert bytes_in_use(jax.devices()[:1]) == [idle + 2 * adapters], "the weights are shared, adapters are cast"
    assert bytes_in_use(jax.devices()[:1]) == [idle]
    assert builder.hybrid.copy_bytes_per_device == 2 * adapters


@pytest.mark.slow
def test_weights_wait_in_host_memory_and_adapters_stay():
    config = replace(config_of(devices=2, dtype="bfloat16", fsdp=2), offload=("actor",))
    _, workers = build(config, "actor", "reference")
    actor, sequences = workers["actor"], experience().sequences
    assert kinds_of_memory(actor.parameters.tree) == {"pinned_host"}
    logp = workers["reference"].compute_ref_log_prob(sequences)
    with actor.generating():
        pass
    assert kinds_of_memory(actor.parameters.tree) == {"pinned_host"}
    assert np.array_equal(actor.compute_log_prob(sequences), logp)
    actor.update_actor([experience()], objective=policy_objective, settings=replace(config.algorithm, kl=None))
    assert kinds_of_memory((actor.parameters.tree, actor.optimizer.tree)) == {"pinned_host"}


def test_what_a_reference_without_weights_cannot_do_is_refused():
    with pytest.raises(ValueError, match="the reference shares the actor's frozen weights"):
        checked(replace(config_of(), offload=("reference",)))
    given = config_of(lora=replace(LORA, start="adapters"))
    with pytest.raises(ValueError, match=r"actor\.lora\.start also gives the reference adapters"):
        checked(replace(given, reference_layout=Layout(tensor=2)))


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(fsdp=2, stage=2, tensor=2), Layout(fsdp=4), Layout(tensor=4)], ids=str
)
def test_the_estimate_counts_what_a_device_holds_of_adapters(layout):
    config = scratch_config(FromScratch(hidden_size=32, num_layers=4, num_kv_heads=4), vocab_size=512)
    lora = Lora(rank=4, targets=("query", "key", "output", "down"))
    mesh = factored_mesh(layout, jax.devices()[: layout.fsdp * layout.stage * layout.tensor])
    shapes = adapter_shapes(config, "lm", lora)
    held = shard_bytes(shapes, RoleWeights("actor", config, "lm", None, lora).adapter_layout(mesh)) / 4
    assert weights_trained(config, "lm", lora, layout) == held


def test_the_search_counts_moments_and_gradients_of_adapters_alone():
    role = Role("actor", DENSE, "lm", passes=1, trained=True, remat=True)
    problem = PlacementProblem(roles=(role,), workload=WORK, software=Software(), hardware=UNIT)

    def held(role: Role):
        simulated = Simulator(problem).role(role, Layout(1), 1, (), generates=False)
        update = next(step for step in simulated.steps if step.verb == "update")
        return simulated.idle_bytes, update.held_bytes - simulated.idle_bytes

    lora = Lora(rank=1, targets=("query",))
    heads = DENSE.num_heads * DENSE.head_dim
    learnt = DENSE.num_layers * (DENSE.hidden_size + heads)
    whole, adapters = held(role), held(replace(role, lora=lora))
    weights = weight_counts(DENSE, "lm").total
    assert whole[0] == weights * (4 + 8)
    assert adapters[0] == weights * 2 + learnt * (4 + 8)
    assert whole[1] - adapters[1] == (weights - learnt) * 8
