"""Predictions with adapters, compared with operations by XLA and bytes of roles; plans without a reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compiled import to_read
from made_plans import a_config, machines
from unit_machines import DENSE, HALVES, STEPS, UNIT, WORK, trained

from jaxrlhf import models
from jaxrlhf.config import GRPO, KLInLoss, Layout, Lora, Pool, Training
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora.lora import adapted, adapter_shapes
from jaxrlhf.models.memory import adapters_held
from jaxrlhf.planner.apply import planned_config
from jaxrlhf.planner.cost.cost import forward_cost, update_cost
from jaxrlhf.planner.cost.simulate import Simulator
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.problem import question_of
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.workers.role_weights import RoleWeights

LORA = Lora(rank=8)
# Two layers: XLA counts the body of a loop once. In a single layer it would leave out the gradient of the input.
MODEL = ModelConfig("llama", 512, 256, 768, 2, 8, 4, 32)
ROWS, WIDTH = 2, 256


@pytest.mark.parametrize(
    ("lora", "remat"),
    [(LORA, False), *(pytest.param(*case, marks=pytest.mark.seeds) for case in [(LORA, True), (None, False)])],
    ids=["adapters", "adapters, recomputed", "whole"],
)
def test_an_update_multiplies_as_often_as_xla_says(lora, remat):
    ints = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
    shapes = models.param_shapes(MODEL, "value")
    learnt = shapes if lora is None else adapter_shapes(MODEL, "lm", lora)

    def loss(learnt, params, *ints):
        whole = learnt if lora is None else adapted(params, learnt)
        return jnp.square(
            models.hidden_states(whole, MODEL, *ints, execution=models.Execution(remat=remat)).hidden_RWD
        ).sum()

    counted = to_read(jax.jit(jax.grad(loss)).lower(learnt, shapes, ints, ints, ints)).cost_analysis()["flops"]
    work = replace(WORK, prompts=ROWS, responses=ROWS, prompt_tokens=WIDTH / 2, response_tokens=WIDTH / 2)
    role = trained(MODEL, head="value", rows_per_microbatch=ROWS, remat=remat, lora=lora)
    predicted = update_cost(role, Layout(1), work, HALVES, UNIT).compute_s
    assert predicted / MODEL.num_layers == pytest.approx(counted, rel=0.06)


@pytest.mark.parametrize("remat", [False, True])
def test_frozen_weights_have_two_thirds_of_an_update_and_adapters_all(remat):
    whole, adapters = (update_cost(trained(DENSE, remat=remat, lora=lora), Layout(1), WORK, HALVES, UNIT)
                       for lora in (None, LORA))  # fmt: skip
    tokens, matrices = 64 * 16, 4 * (4 * 32 * 32 + 3 * 32 * 48) + 32 * 64 * 6 / 16  # logits of responses alone
    own = 4 * 8 * (4 * (32 + 32) + 3 * (32 + 48))
    assert own == adapters_held(DENSE, LORA, Layout(1))
    assert whole.compute_s - adapters.compute_s == pytest.approx(2 * tokens * (matrices - (3 + remat) * own))
    # The optimizer reads two bytes of gradient, and reads and writes two of weight and four of moments; 16 microbatches
    # read two gradients and write their sum.
    assert adapters.memory_s == pytest.approx(own * (2 + 2 * 2 + 2 * 4 + 16 * 3 * 2))
    scored = [forward_cost(trained(DENSE, lora=lora), Layout(1), WORK, HALVES, UNIT).compute_s for lora in (None, LORA)]
    assert scored[1] - scored[0] == pytest.approx(2 * tokens * own)


def test_gradients_of_frozen_weights_go_nowhere():
    role = trained(DENSE, rows_per_microbatch=64, lora=LORA)
    # Weights are gathered twice, gradients of adapters summed over all eight devices, embeddings exchanged twice.
    assert update_cost(role, Layout(1, 8), WORK, HALVES, STEPS).collective_s == 2 * 7 + 2 * 7 + 2 * 7
    assert update_cost(role, Layout(8), WORK, HALVES, STEPS).collective_s == 2 * 7
    held = adapters_held(DENSE, LORA, Layout(8))
    assert update_cost(role, Layout(8), WORK, HALVES, UNIT).collective_s == pytest.approx(2 * 7 / 8 * held * 2)


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("nf4", 4)])
@pytest.mark.parametrize(("dtype", "itemsize"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_matrices_of_few_bits_take_what_they_take(kind, bits, dtype, itemsize):
    lora = replace(LORA, quantize=kind)
    role, software = trained(MODEL, lora=lora), replace(HALVES, compute_bytes=itemsize)
    problem = PlacementProblem((role,), WORK, software, UNIT)
    held = Simulator(problem).role(role, Layout(1), 1, (), generates=False).idle_bytes
    shapes = RoleWeights("actor", MODEL, "lm", dtype, lora).shapes()["parameters"]
    frozen = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    vectors = 2 * 2 * 256 + 256
    own = adapters_held(MODEL, lora, Layout(1)) * (software.weight_bytes + software.optimizer_bytes)
    assert abs(held - own - frozen) <= vectors * 4
    matrices = 2 * (256 * (256 + 2 * 128 + 256) + 3 * 256 * 768)
    assert frozen < matrices * (bits / 8 + itemsize / 32) + (2 * 512 * 256 + vectors) * itemsize + vectors * 4


# Plans.


def adapting(**changes):
    algorithm = GRPO(responses_per_update=32, kl=KLInLoss())
    return a_config(algorithm=algorithm, actor=Training(lora=LORA), **changes)


def test_the_actor_makes_the_passes_of_a_reference_that_it_is_without_its_adapters():
    on = machines(machines=1, memory_bytes=80e9, matmul_flops_per_s=1e14, memory_bytes_per_s=1e12)
    problem = question_of(adapting(), on, vocabulary=100).problem
    assert [role.name for role in problem.roles] == ["actor", "reward"]
    assert problem.roles[0].passes == 2  # with four updates a step it also computes the old log-probabilities
    assert problem.offloads[-1] == ("actor", "reward")
    plans = search(problem, keep=2).plans
    assert sorted(len(plan.pools) for plan in plans) == [1, 2]
    for plan in plans:
        config = planned_config(adapting(), plan)
        assert config.reference_is_frozen_actor
        assert sum("reference" in pool.roles for pool in config.pools) == 1
        again = question_of(config, on, vocabulary=100).problem
        assert [set(roles) for roles, _ in again.pools] == [set(pool.roles) for pool in plan.pools]
        assert search(again).plans[0].seconds == pytest.approx(plan.seconds)


def test_a_reference_elsewhere_has_weights_of_its_own():
    apart = (Pool("a", 4, ("actor", "reward")), Pool("b", 4, ("reference",)))
    for config in (adapting(pools=apart), adapting(reference_layout=Layout(fsdp=2))):
        problem = question_of(config, machines(), vocabulary=100).problem
        assert [role.name for role in problem.roles] == ["actor", "reference", "reward"]
        assert [role.passes for role in problem.roles] == [1, 1, 1]
