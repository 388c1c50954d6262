"""Counts of the roofline: by hand on tiny sizes, by enumeration, and beside XLA's count."""

from itertools import product

import jax
import jax.numpy as jnp
import pytest

from scripts.benchmarks import roofline
from scripts.benchmarks import workload as bench

FOREVER = float("inf")


@pytest.fixture
def tiny(monkeypatch):
    """34 weights in the layer (8 + 8 for attention, 18 for the rest), 10 in the head."""
    monkeypatch.setitem(bench.PRESETS, "hand", bench.Preset(2, 1, 1, 1, 3, 5))
    return bench.Workload("hand", prompts=1, responses=2, prompt_tokens=2, new_tokens=3)


@pytest.fixture
def ending(monkeypatch):
    """Prompts of 16 to 18 tokens and responses of at most 3."""
    monkeypatch.setitem(bench.PRESETS, "ending", bench.Preset(2, 1, 1, 1, 3, 5, ends=True))
    return bench.Workload("ending", prompts=3, responses=2, prompt_tokens=18, new_tokens=3)


def every_response(workload):
    """Lengths of prompt and response, and how likely they are together."""
    p = 1 / 64
    chances = {1: p, 2: (1 - p) * p, 3: (1 - p) ** 2}
    return [(prompt, new, chances[new] / 3) for prompt, new in product((16, 17, 18), (1, 2, 3))]


def test_generation_bound_by_products_is_counted_by_hand(tiny):
    prompt = 2 * (2 * 34) + 4 * 2 * (1 + 2) + 2 * 10
    decoding = sum(2 * (2 * 44 + 4 * 2 * filled) for filled in (3, 4))
    assert roofline.generate_s(tiny, roofline.Machine(1.0, FOREVER)) == pytest.approx(prompt + decoding)


def test_generation_bound_by_memory_is_counted_by_hand(tiny):
    weights = 4 * 44
    decoding = sum(weights + 2 * 4 * (2 * 2 * filled) for filled in (3, 4))
    assert roofline.generate_s(tiny, roofline.Machine(FOREVER, 1.0)) == pytest.approx(weights + decoding)


def test_a_decode_step_takes_the_longer_of_products_and_bytes(tiny):
    prompt, weights = 180, 176
    steps = [(2 * (88 + 8 * filled), weights + 32 * filled) for filled in (3, 4)]
    machine = roofline.Machine(1.0, 1.0)
    assert roofline.generate_s(tiny, machine) == pytest.approx(max(prompt, weights) + sum(map(max, steps)))


def test_a_grpo_update_is_three_passes_and_the_optimizer(tiny):
    forward = 2 * (5 * 2 * 34 + 4 * 2 * 15 + 3 * 2 * 10) - (2 * 2 * 34 + 4 * 2 * 3)  # the prompt once
    weights = 34 + 2 * 10  # embedding and head are two
    found = roofline.least(tiny, roofline.Machine(2.0, 8.0))
    assert found["prepare_s"] == pytest.approx(forward / 2)
    assert found["update_s"] == pytest.approx(3 * forward / 2 + 7 * 4 * weights / 8)
    assert found["step_s"] == pytest.approx(found["generate_s"] + found["prepare_s"] + found["update_s"])


def test_ppo_adds_a_critic_without_the_vocabulary(tiny):
    workload = bench.Workload(**{**vars(tiny), "algorithm": "ppo"})
    trunk = 2 * (5 * 2 * 34 + 4 * 2 * 15) - (2 * 2 * 34 + 4 * 2 * 3)
    alone, both = (roofline.least(each, roofline.Machine(1.0, 1.0)) for each in (tiny, workload))
    assert both["prepare_s"] - alone["prepare_s"] == pytest.approx(trunk)
    assert both["update_s"] - alone["update_s"] == pytest.approx(3 * trunk + 7 * 4 * (34 + 10))


def test_expected_passes_over_responses_that_end_are_those_of_every_response(ending):
    def forward(prompt, new):
        length = prompt + new
        return length * 2 * 34 + 4 * 2 * length * (length + 1) / 2 + new * 2 * 10

    expected = 6 * sum(chance * forward(prompt, new) for prompt, new, chance in every_response(ending))
    expected -= (6 - 3) * sum(forward(prompt, 0) / 3 for prompt in (16, 17, 18))  # one of two responses shares it
    assert roofline.forward_flops(ending, head=True) == pytest.approx(expected)


def test_expected_tokens_are_those_of_every_response(ending):
    expected = 6 * sum(chance * new for _, new, chance in every_response(ending))
    assert roofline.generated_tokens(ending) == pytest.approx(expected)


def test_expected_decoding_is_that_of_every_response(ending):
    prompts = sum(length * 2 * 34 + 4 * 2 * length * (length + 1) / 2 + 2 * 10 for length in (16, 17, 18))
    decoding = 6 * sum(
        chance * sum(2 * 44 + 4 * 2 * (prompt + step) for step in range(1, new))
        for prompt, new, chance in every_response(ending)
    )
    assert roofline.generate_s(ending, roofline.Machine(1.0, FOREVER)) == pytest.approx(prompts + decoding)


def test_weights_are_read_only_while_a_response_goes_on(ending):
    machine, p = roofline.Machine(FOREVER, 1.0), 1 / 64
    cache = (
        6
        * 4
        * sum(
            chance * sum(2 * 2 * (prompt + step) for step in range(1, new))
            for prompt, new, chance in every_response(ending)
        )
    )
    any_left = [1 - (1 - (1 - p) ** step) ** 6 for step in (1, 2)]
    assert roofline.generate_s(ending, machine) == pytest.approx(4 * 44 * (1 + sum(any_left)) + cache)


def test_a_forward_pass_is_what_xla_counts():
    preset, length = bench.PRESETS["tiny"], 48
    width, head_dim = preset.hidden, preset.hidden // preset.heads
    shapes = {"q": (width, width), "k": (width, 2 * head_dim), "v": (width, 2 * head_dim), "o": (width, width)}
    shapes |= {"gate": (width, preset.inner), "up": (width, preset.inner), "down": (preset.inner, width)}
    keys = jax.random.split(jax.random.key(0), preset.layers)
    layers = [{name: jax.random.normal(key, shape) for name, shape in shapes.items()} for key in keys]

    def forward(layers, head, x):
        for layer in layers:
            q = (x @ layer["q"]).reshape(length, preset.kv_heads, -1, head_dim)
            k, v = ((x @ layer[name]).reshape(length, preset.kv_heads, head_dim) for name in "kv")
            weight = jax.nn.softmax(jnp.einsum("tkgh,skh->kgts", q, k))
            x = x + jnp.einsum("kgts,skh->tkgh", weight, v).reshape(length, -1) @ layer["o"]
            x = x + (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
        return x @ head

    inputs = layers, jnp.ones((width, preset.vocab)), jnp.ones((length, width))
    counted = jax.jit(forward).lower(*inputs).compile().cost_analysis()["flops"]
    causal = bench.forward_flops(preset, 1, length, read=length)
    masked = preset.layers * 4 * width * (length**2 - length * (length + 1) / 2)  # XLA multiplies those pairs too
    assert causal + masked == pytest.approx(counted, rel=0.04)
    assert causal + masked < counted, "norms and activations are not in our count"


def test_shares_are_of_what_was_measured(tiny, monkeypatch):
    monkeypatch.setattr(bench, "WORKLOADS", {"hand": tiny})
    machine = roofline.Machine(1e3, 1e3)
    measured = {"hand": {"jaxrlhf": {phase: 4 * s for phase, s in roofline.least(tiny, machine).items()}}}
    found = roofline.compare(machine, measured)["hand"]
    assert found["share"] == dict.fromkeys(roofline.PHASES, 0.25)
    assert found["least"]["generated_tokens_per_s"] == pytest.approx(6 / 0.756, rel=0.01)


def test_supervised_updates_sample_nothing_and_need_no_reference(tiny):
    found = roofline.least(bench.Workload(**{**vars(tiny), "algorithm": "sft"}), roofline.Machine(2.0, 8.0))
    grpo = roofline.least(tiny, roofline.Machine(2.0, 8.0))
    assert found == {"update_s": grpo["update_s"], "step_s": grpo["update_s"]}


def test_preference_pairs_have_a_reference_and_sample_nothing(tiny):
    found = roofline.least(bench.Workload(**{**vars(tiny), "algorithm": "dpo"}), roofline.Machine(2.0, 8.0))
    grpo = roofline.least(tiny, roofline.Machine(2.0, 8.0))
    assert found == {
        **{phase: grpo[phase] for phase in ("prepare_s", "update_s")},
        "step_s": pytest.approx(grpo["prepare_s"] + grpo["update_s"]),
    }


def test_workloads_of_the_chat_model_have_its_shape():
    workload = roofline.workloads()["smollm2_grpo"]
    preset = bench.PRESETS[workload.preset]
    assert preset.matmul_parameters + preset.head_parameters == pytest.approx(134.5e6, rel=0.001)
