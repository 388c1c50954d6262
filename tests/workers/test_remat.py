"""Choice of rematerialization: as configured, or by what the device has room for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import get_config
from unit_machines import DENSE, FREE, HALVES, UNIT, WORK, trained, weights_of

from jaxrlhf.config import Layout, Lora, Training
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.models import Execution, hidden_states, init_params
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.cost import simulate
from jaxrlhf.planner.cost.batches import batch_of
from jaxrlhf.planner.cost.cost import update_cost
from jaxrlhf.planner.cost.exchanges import mixed_width
from jaxrlhf.planner.cost.simulate import Simulator, update_bytes
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.workload import Role, Software
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.workers import remat
from jaxrlhf.workers.build import Builder, Phase
from jaxrlhf.workers.pool_roles import PoolRoles
from jaxrlhf.workers.summary import pool_rows

pytestmark = pytest.mark.usefixtures("programs")

ROLES = ("actor", "critic", "reference", "reward")


def on_pool(setting: str = "auto", *, roles=ROLES, offload=(), lora: Lora | None = None, **changes) -> PoolRoles:
    config = get_config()
    optimizer = replace(config.actor.optimizer, **changes)
    training = replace(config.actor, remat=setting, lora=lora, optimizer=optimizer)
    algorithm = replace(config.algorithm, critic=training)
    config = replace(config, actor=training, algorithm=algorithm, offload=offload)
    return PoolRoles(config, embedded_tokenizer(), ResourcePool("all", tuple(jax.devices()[:1])), roles)


def built(setting: str = "auto", **how) -> Builder:
    roles = on_pool(setting, **how)
    return Builder(roles.config, roles.tokenizer, roles.pool, roles.roles, progress=lambda *_: None)


def on_accelerator(roles: PoolRoles, memory: int | None) -> PoolRoles:
    """Return the roles on a device that reports its memory, or reports none."""
    stats = None if memory is None else {"bytes_limit": memory, "bytes_in_use": 5}
    device = SimpleNamespace(platform="gpu", process_index=0, memory_stats=lambda: stats)
    names = ("config", "roles", "training", "mesh", "model_of", "weights", "widest_row", "execution", "dtype")
    return SimpleNamespace(pool=SimpleNamespace(devices=(device,)), **{name: getattr(roles, name) for name in names})


def chosen(roles: PoolRoles, memory: int | None) -> bool:
    return remat.choose_remat(on_accelerator(roles, memory), "actor").on


def most(roles: PoolRoles) -> int:
    """MiB of memory from which on activations are kept."""
    low, high = 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chosen(roles, middle << 20) else (low, middle)
    return high


@pytest.mark.parametrize(("setting", "on"), [("full", True), ("offload", True), ("none", False)])
def test_what_is_configured_holds_whatever_the_memory(setting: str, on: bool) -> None:
    builder = built(setting)
    assert {role: choice.on for role, choice in builder.remat.items()} == {"actor": on, "critic": on}
    assert all(chosen(builder.on, memory) == on for memory in (None, 1 << 20, 1 << 50))


def test_on_cpu_and_where_the_memory_is_not_known_layers_are_computed_again() -> None:
    builder = built()
    assert builder.remat["actor"].on and "CPU" in builder.remat["actor"].why
    unknown = remat.choose_remat(on_accelerator(builder.on, None), "actor")
    assert unknown.on and "do not report their memory" in unknown.why


def test_activations_are_kept_while_all_that_is_held_takes_three_fifths_of_the_memory() -> None:
    roles = on_pool()
    policy, value = (weights_of(roles.model, head) for head in ("lm", "value"))
    # Weights, moments and two gradients of the actor; weights and moments of the critic; a frozen copy in float32.
    held = 20 * policy + 12 * value + 4 * policy
    tokens, model = 1024 // 240 * 240, roles.model  # rows of three sequences of 80
    # Six residuals twice, queries, keys, values and what is mixed of them, and six of the MLP, in float32.
    layer = 12 * 32 * 4 + (4 * 32 + 6 * 64) * 4
    scores = 4 * 240 / 2 * 8
    # Beside them one layer's scores have gradients, or before that the logits have.
    activations = tokens * (2 * layer + 2 * scores) + max(tokens * scores, 2 * 512 * model.vocab_size * 4)
    assert most(roles) == pytest.approx((held + activations) / 0.6 / 2**20, abs=1)
    message = remat.choose_remat(on_accelerator(roles, 1 << 30), "actor")
    assert not message.on and "of 1.0 GiB" in message.why


@pytest.mark.slow
def test_what_waits_on_the_host_or_is_on_another_pool_leaves_room() -> None:
    policy, value = (weights_of(on_pool().model, head) for head in ("lm", "value"))

    def needed(role: str = "actor", *, roles=ROLES, offload=()) -> float:
        return remat.update_bytes(on_pool(roles=roles, offload=offload), role)

    assert needed() - needed(roles=("actor", "reference")) == 12 * value
    assert needed() - needed(offload=("critic",)) == 12 * value
    assert needed() - needed(offload=("critic.optimizer", "reference")) == 8 * value + 4 * policy
    assert needed() == needed(offload=("actor",))  # it is there while it is updated
    assert needed("critic") - needed("critic", offload=("actor", "critic")) == 12 * policy


def test_what_the_optimizer_keeps_beside_or_in_place_of_two_float32_moments_is_counted() -> None:
    plain, few, average = (
        built(roles=("actor",), **how) for how in ({}, {"state_dtype": "bfloat16"}, {"average_decay": 0.9})
    )
    moments, fewer, more = (remat.update_bytes(one.on, "actor") for one in (plain, few, average))
    weights = weights_of(plain.on.model, "lm")
    assert moments - fewer == more - moments == 4 * weights
    for builder, said in ((few, "two Adam moments in bfloat16"), (average, "moments, average of the weights")):
        [row] = [row for row in pool_rows(builder) if row[:2] == ("actor", "train state")]
        assert row[3].endswith(said)


def test_a_cold_start_trains_all_weights_of_the_actor_and_no_more_than_adapters_of_the_critic() -> None:
    roles = on_pool(lora=Lora(rank=2, targets=("query",)))
    policy, value = (weights_of(roles.model, head) for head in ("lm", "value"))
    adapters = 2 * 2 * (32 + 32)  # rank, layers, and the sum of a matrix's sides
    for role, held in [("actor", 20 * policy + 4 * value + 12 * adapters),
                       ("critic", 12 * policy + 4 * value + 20 * adapters)]:  # fmt: skip
        assert remat.update_bytes(roles, role) == held + remat.activation_bytes(roles, role, remat=False)


def test_the_table_says_what_was_chosen_and_why() -> None:
    for setting, value in [("auto", "full"), ("offload", "offload"), ("none", "none")]:
        builder = built(setting)
        rows = {row[:2]: row[2:] for row in pool_rows(builder)}
        assert rows["actor", "remat"] == rows["critic", "remat"] == (value, builder.remat["actor"].why)
        assert ("already in host memory" in rows["actor", "remat"][1]) == (setting == "offload")
    assert rows["actor", "remat"][1] == "as configured"


def test_workers_do_what_was_chosen() -> None:
    for setting, on in [("auto", True), ("offload", True), ("none", False)]:
        builder = built(setting, roles=("actor", "critic"))
        workers = builder.workers(Phase(builder.config, ("actor", "critic"), total_updates=1))
        for worker in workers.values():
            assert worker.setup.execution.remat == on
            assert worker.setup.execution.offloads == (setting == "offload")


@pytest.mark.slow
def test_inputs_of_layers_go_to_host_memory_and_come_back_with_the_same_numbers() -> None:
    config = ModelConfig("qwen2", 64, 32, 64, 3, 4, 2, 8, qkv_bias=True)
    params = init_params(config, "lm", jax.random.key(0))
    token_RW = jax.random.randint(jax.random.key(1), (2, 24), 0, 64)
    rows = token_RW, jnp.tile(jnp.arange(24), (2, 1)), jnp.ones_like(token_RW)

    def gradient(**how: bool) -> Any:
        execution = Execution(**how)
        return jax.jit(
            jax.grad(lambda p: hidden_states(p, config, *rows, execution=execution).hidden_RWD[..., 0].sum())
        )

    full, offload = (gradient(remat=True, offloads=offloads) for offloads in (False, True))
    jax.tree.map(np.testing.assert_array_equal, full(params), offload(params))
    # On CPU they stay; what other compilers are told does not depend on the machine.
    texts = [program.trace(params).lower(lowering_platforms=("cuda",)).as_text() for program in (full, offload)]
    assert [text.count('placement = "pinned_host"') for text in texts] == [0, 1], "each turn of the loop sends its own"
    assert [text.count('placement = "device"') for text in texts] == [0, 1]


def test_stages_do_not_offload(refused) -> None:
    with refused():
        Training(remat="offload", layout=Layout(stage=2))


# Plans.


ALONE = Layout(1)
LARGE = ModelConfig("llama", 1000, 256, 1024, 8, 4, 4, 64)


def simulated(role: Role, memory: float, *, shared: bool = False, offload=(), others: tuple[Role, ...] = ()):
    hardware = replace(UNIT, memory_bytes=memory, shared_compute=shared)
    problem = PlacementProblem((role, *others), WORK, Software(), hardware)
    return Simulator(problem).role(role, Layout(1), 1, offload, generates=False)


def test_a_plan_keeps_activations_where_the_run_would() -> None:
    free, kept, again = (trained(LARGE, remat=remat) for remat in (None, False, True))
    weights = weights_of(LARGE)
    needed = max(step.held_bytes for step in simulated(kept, FREE).steps)
    assert needed > 20 * weights
    assert simulated(free, needed / 0.59).steps == simulated(kept, needed / 0.59).steps
    assert simulated(free, needed / 0.61).steps == simulated(again, needed / 0.61).steps
    assert simulated(free, FREE, shared=True).steps == simulated(again, FREE, shared=True).steps
    # Others are taken to be there as well, but for what waits on the host.
    frozen = replace(trained(LARGE), name="reference", trained=False)
    assert simulated(free, needed / 0.59, others=(frozen,)).seconds == simulated(again, FREE).seconds
    waiting = simulated(free, needed / 0.59, others=(frozen,), offload=("reference",))
    assert waiting.seconds == simulated(kept, FREE).seconds
    with pytest.raises(AssertionError, match="sets remat first"):
        update_cost(free, Layout(1), WORK, Software(), UNIT)


def test_a_plan_counts_what_waits_on_the_host_and_its_way_there_and_back() -> None:
    full = trained(LARGE, remat=True)
    cases = [simulated(role, FREE).steps[-1] for role in (full, replace(full, offloads=True))]
    tokens, updates = WORK.responses * (WORK.prompt_tokens + WORK.response_tokens) / WORK.updates, WORK.updates
    layer = batch_of(full, Layout(1), WORK.responses / WORK.updates, WORK, Software()).tokens * LARGE.hidden_size * 2
    assert cases[0].held_bytes - cases[1].held_bytes == pytest.approx((LARGE.num_layers - 2) * layer)
    moved = 2 * tokens * updates * LARGE.num_layers * LARGE.hidden_size * 2
    assert cases[1].cost.host_s - cases[0].cost.host_s == pytest.approx(moved / UNIT.host_bytes_per_s)
    assert replace(cases[1].cost, host_s=0.0) == replace(cases[0].cost, host_s=0.0)


def test_what_layers_that_are_computed_again_hold_on_tpus_and_with_shared_prompts(monkeypatch) -> None:
    def needed(role: Role, layout: Layout = ALONE, **changes: Any) -> float:
        return update_bytes(PlacementProblem((role,), WORK, replace(HALVES, **changes), UNIT), role, layout)

    again, kept = trained(DENSE, remat=True), trained(DENSE, remat=False)
    assert needed(kept, compiler="tpu") == needed(kept)
    for tensor in (1, 2):
        layout = Layout(1, tensor=tensor)
        tokens = batch_of(again, layout, WORK.responses * WORK.epochs / WORK.updates, WORK, HALVES).tokens
        more = needed(again, layout, compiler="tpu") - needed(again, layout)
        assert more == pytest.approx(tokens * 6 * DENSE.intermediate_size / tensor * 2), "two bytes more of each"

    packed = replace(again, tokens_per_microbatch=240)
    for layout in (ALONE, Layout(1, context=2)):
        batch = batch_of(packed, layout, WORK.responses * WORK.epochs / WORK.updates, WORK, HALVES)
        assert batch.shares
        with monkeypatch.context() as patch:
            patch.setattr(simulate, "mixed_width", lambda *_: 0.0)
            inputs_alone = needed(packed, layout)
        more = needed(packed, layout) - inputs_alone
        assert more == pytest.approx(batch.tokens * DENSE.num_layers * DENSE.num_heads * DENSE.head_dim * 2)
    wide = replace(DENSE, num_heads=28, num_kv_heads=4)
    assert mixed_width(wide, Layout(1, context=8)) == 32 * wide.head_dim, "heads that fill up are kept as well"
    assert mixed_width(wide, Layout(1, tensor=4)) == 7 * wide.head_dim
