"""Messages of a search in which nothing fits, compared with bytes counted by hand."""

import re
from dataclasses import replace

import pytest
from made_plans import machines
from small_problems import PLAIN

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Infeasible, PlacementProblem
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.workload import Role, Workload

# Attention 4e6, MLP 9e6, norms 2e3 in each of 10 layers; embedding and head 1e6 each, last norm 1e3.
SMALL = ModelConfig("llama", 1000, 1000, 3000, 10, 10, 10, 100)
WEIGHTS = 132_021_000
# Attention 4 * (4 + 8) + 16 = 64, MLP 96, norms 8: 168 in each of 2 layers; embedding and head 32 each, last norm 4.
TINY = ModelConfig("llama", 8, 4, 8, 2, 2, 2, 2)
TINY_WEIGHTS = 404
WORK = Workload(prompts=8, responses=8, prompt_tokens=50.0, response_tokens=50.0, longest_tokens=100)
LEARNER = Role("actor", SMALL, "lm", passes=0, trained=True)
REFERENCE = Role("reference", TINY, "lm")
# 100 tokens in float16: inputs of 10 layers; of one 6 residuals and the inputs of 2 norms, 4000 of heads and 18000 of
# the MLP; 1000 of mixed heads in float32. Logits and their gradient, which take less, are gone by then.
ACTIVATIONS = 100 * ((10 * 1000 + 8000 + 22_000) * 2 + 1000 * 4)
LEARNER_BYTES = WEIGHTS * (4 + 2 * 4 + 8) + ACTIVATIONS
GATHERED = 2 * 13_000_000 * 2  # two layers; the embedding is gathered when they are not
LAST = "fewer tokens_per_microbatch, shorter sequences or devices with more memory would help"


def hardware_of(count: int, machine: int, memory_bytes: float) -> Hardware:
    """Return machines with a slow network, over which no layer is split."""
    return machines(machines=count, devices_per_machine=machine, memory_bytes=memory_bytes, usable_memory=0.9,
                    network_bytes_per_s=1.0)  # fmt: skip


def a_problem(roles: tuple[Role, ...], hardware: Hardware, work: Workload = WORK, **changes) -> PlacementProblem:
    return PlacementProblem(roles, work, PLAIN, hardware, **changes)


def refusal(problem: PlacementProblem) -> str:
    with pytest.raises(Infeasible) as found:
        search(problem)
    return str(found.value)


def gib(number: float) -> str:
    return f"{number / 1024**3:.3g} GiB"


def too_large(devices: int, call: str, needs: float, usable: float, offload=("actor", "reference")) -> str:
    role = call.split()[0]
    return (
        f"{role} does not fit {devices} x made: in the best layout, with offload={offload}, {call} "
        f"needs {gib(needs)} on each device, {gib(needs - usable)} more than the {gib(usable)} that a plan may fill; "
    )


def test_a_model_that_is_too_large_is_named_with_its_bytes_and_what_would_do():
    small = hardware_of(1, 1, 1e9)
    problem = a_problem((LEARNER, REFERENCE), small)
    # On 4 devices: a quarter of the weights, two whole layers and the embedding, and the same activations.
    assert WEIGHTS * 20 / 2 > 0.9e9 > WEIGHTS * 20 / 4 + GATHERED + ACTIVATIONS
    message = refusal(problem)
    advice = "4 machines of 1 would suffice; offload=('actor', 'reference') would free the most memory; "
    assert message == too_large(1, "actor update", LEARNER_BYTES, 0.9e9) + advice + LAST
    assert (gib(LEARNER_BYTES), gib(0.9e9)) == ("2.47 GiB", "0.838 GiB")
    assert refusal(replace(problem, hardware=hardware_of(2, 1, 1e9))).startswith("actor does not fit 2 x made")
    assert search(replace(problem, hardware=hardware_of(4, 1, 1e9))).plans


def test_machines_that_would_do_are_counted_in_doublings_of_those_there_are():
    problem = a_problem((LEARNER,), hardware_of(5, 1, 4e8))
    assert WEIGHTS * 20 / 5 > 0.9 * 4e8 > WEIGHTS * 20 / 10 + GATHERED + ACTIVATIONS
    message = refusal(problem)
    assert message.startswith("actor does not fit 5 x made")
    assert "; 10 machines of 1 would suffice; " in message
    assert search(replace(problem, hardware=hardware_of(10, 1, 4e8))).plans


def test_where_nothing_splits_the_weights_no_number_of_machines_helps():
    # One layer of one head: 4e6 + 9e6 + 2e3, embedding and head 2e6, last norm 1e3.
    whole = replace(SMALL, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1000)
    problem = a_problem((replace(LEARNER, model=whole),), hardware_of(1, 1, 1e8), fsdp=False)
    # The residual stream into the layer; of it 8000 + 4000 of heads + 18000 of the MLP, mixed heads once more in
    # float32.
    needs = 15_003_000 * 20 + 100 * ((1000 + 30_000) * 2 + 1000 * 4)
    advice = (
        "more machines do not help; offload=('actor',) would free the most memory; "
        "fsdp layouts would split weights further; "
    )
    assert refusal(problem) == too_large(1, "actor update", needs, 0.9e8, ("actor",)) + advice + LAST


def test_a_response_that_is_too_long_for_the_cache_is_told():
    generator = Role("actor", TINY, "lm", generates=True, passes=0)
    work = replace(WORK, longest_tokens=10**8)
    problem = a_problem((generator,), hardware_of(1, 1, 3e9), work, offloads=((), ("actor",)))
    # Keys and values of 2 layers and 2 heads of 2 numbers, beside a copy of the weights, all in two bytes.
    needs = TINY_WEIGHTS * 2 + 10**8 * (2 * 2 * 2 * 2 * 2)
    told = too_large(1, "actor generate", needs, 2.7e9, ("actor",))
    assert refusal(problem) == told + "more machines do not help; " + LAST
    # Two shards of the cache fit into a machine of two.
    assert search(replace(problem, hardware=hardware_of(1, 2, 3e9))).plans


def test_a_rollout_on_a_pool_that_is_too_small_is_named():
    # A response of 20000 tokens: keys and values of 10 layers and 1000 numbers in two bytes, beside the weights.
    work, needs = replace(WORK, longest_tokens=20_000), WEIGHTS * 2 + 20_000 * (2 * 10 * 1000 * 2)
    pools = ((("actor", "reference"), 4), ((ROLLOUT,), 1))
    problem = a_problem((replace(LEARNER, generates=True), REFERENCE), hardware_of(1, 8, 1e9), work, pools=pools)
    problem = replace(problem, offloads=(("actor", "reference"),))
    assert WEIGHTS * 20 / 4 + GATHERED + ACTIVATIONS < 0.9e9 < needs
    assert refusal(problem) == too_large(1, "rollout generate", needs, 0.9e9) + LAST
    assert search(replace(problem, pools=((("actor", "reference"), 4), ((ROLLOUT,), 2)))).plans


def test_pools_that_are_given_are_those_that_are_too_small():
    layouts, pools = {"actor": (Layout(fsdp=2),)}, ((("actor",), 2), (("reference",), 2))
    hardware = hardware_of(1, 8, 1e9)
    problem = a_problem(
        (LEARNER, REFERENCE), hardware, layouts=layouts, pools=pools, offloads=(("actor", "reference"),)
    )
    # Half of the weights, gathered layers, and a row of 100 tokens on each device. Devices outside the pool do not
    # help, and machines to come neither.
    needs = WEIGHTS * 20 / 2 + GATHERED + ACTIVATIONS
    assert refusal(problem) == too_large(2, "actor update", needs, 0.9e9) + LAST
    wide = replace(problem, layouts=None, pools=((("actor",), 4), (("reference",), 2)))
    assert search(wide).plans


def test_layouts_that_fill_no_pool_are_named():
    everything = (Layout(data=5), Layout(fsdp=8, generation_tensor=2))
    problem = a_problem(
        (replace(LEARNER, model=TINY), REFERENCE), hardware_of(1, 4, 1e9), layouts={"reference": everything}
    )
    assert refusal(problem) == (
        "the layout set for reference does not fill 4 x made: data=5 x fsdp=1 x stage=1 x tensor=1, "
        "generation 1 x 1 or data=rest x fsdp=8 x stage=1 x tensor=1, generation 1 x 2; change this layout, or leave "
        "it to the search"
    )


def test_two_roles_that_fit_only_apart_are_told_to_offload():
    reference = replace(REFERENCE, model=SMALL)
    usable = LEARNER_BYTES + WEIGHTS  # half of the frozen weights
    problem = a_problem((LEARNER, reference), hardware_of(1, 1, usable / 0.9))
    assert refusal(problem) == (
        "each role alone fits 1 x made with offload=(), but no placement fits all roles: "
        f"actor update needs {gib(LEARNER_BYTES)} of the {gib(usable)} of a device that a plan may fill, and "
        "the roles that share its devices need more than the rest; "
        "offload=('actor', 'reference') would free the most memory; " + LAST
    )
    assert search(replace(problem, offloads=(("actor", "reference"),))).plans
    two = search(replace(problem, hardware=hardware_of(1, 2, usable / 0.9)))
    pools = [[(pool.roles, pool.devices) for pool in plan.pools] for plan in two.plans]
    assert [(("actor",), 1), (("reference",), 1)] in pools


@pytest.mark.parametrize(("change", "advice", "dropped"), [
    ({}, "offload=('actor',) would free the most memory; ", "fsdp"),
    ({"offloads": ((), ("actor",))}, "more machines do not help; " + LAST, "free the most"),
    ({"offloads": (("actor",),), "fsdp": False}, "help; fsdp layouts would split weights further; " + LAST, "remat"),
    ({"roles": (replace(LEARNER, remat=False),)}, "memory; remat='full' would keep fewer activations; ", "fsdp"),
])  # fmt: skip
def test_only_what_is_not_done_yet_is_advised(change, advice, dropped):
    work = replace(WORK, prompt_tokens=2 * 10.0**9, longest_tokens=10**10)
    problem = replace(a_problem((LEARNER,), hardware_of(1, 1, 1e9), work), **change)
    message = refusal(problem)
    assert advice in message
    assert dropped not in message
    assert re.search(r"needs [\d,]*\d{3},\d{3} GiB on each device", message)
