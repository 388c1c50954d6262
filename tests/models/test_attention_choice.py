"""The choice of attention kernels: what computes the same is used, what does not is replaced loudly."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from tiny_models import DECODER
from tiny_runs import get_config

from jaxrlhf import models
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import programs
from jaxrlhf.engine.cache import cache_programs
from jaxrlhf.models.attention import kernel_choice
from jaxrlhf.models.attention.attention import DECODE, PAGES, ROWS
from jaxrlhf.models.config import LatentAttention
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.kernels.gpu import pallas_decode
from jaxrlhf.models.kernels.gpu_pages import pallas_pages
from jaxrlhf.models.kernels.tpu import splash_rows
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.topology import topology
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.workers.build import Builder
from jaxrlhf.workers.summary import pool_rows

CONFIG = replace(DECODER, head_dim=16)
xla_rows, xla_decode, xla_pages = ROWS["xla"], DECODE["xla"], PAGES["xla"]


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    """A process that has tried nothing, whose CPU has kernels of its own: those of `xla` under other names."""
    monkeypatch.setitem(kernel_choice.BEST, "cpu", ("splash", "pallas", "pallas"))
    monkeypatch.setitem(ROWS, "splash", xla_rows)
    monkeypatch.setitem(DECODE, "pallas", xla_decode)
    monkeypatch.setitem(PAGES, "pallas", xla_pages)
    kernel_choice._usable.cache_clear()
    yield
    kernel_choice._usable.cache_clear()


def choose(config=CONFIG, dtype=jnp.float32, shape=(1, 1, 1), decodes=True, **settings):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, ("data", "stage", "tensor"), axis_types=(AxisType.Auto,) * 3)
    axes = {"row_axes": ("data",), "head_axes": ("tensor",), "stage_axes": ("stage",)}
    chosen = models.choose_execution(config, dtype, mesh, **axes, decodes=decodes, **settings)
    assert chosen.mesh is None or (chosen.mesh, chosen.row_axes, chosen.head_axes) == (mesh, ("data",), ("tensor",))
    paged = settings.get("cache") is not None
    return (chosen.decode_kernel, chosen.pages_kernel) if paged else (chosen.rows_kernel, chosen.decode_kernel)


def raises(*arrays):
    raise NotImplementedError("no such instruction\non this chip")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_compute_the_same_are_used(dtype):
    assert choose(dtype=dtype) == ("splash", "pallas")


def test_kernels_are_chosen_for_described_devices_that_belong_to_other_processes():
    devices = topology(hardware("h100x2"))
    mine, others = (Mesh(np.array(part), ("data",), axis_types=(AxisType.Auto,)) for part in (devices[:8], devices[8:]))
    assert not others.local_devices
    how = {"row_axes": ("data",), "head_axes": (), "decodes": True}
    chosen = [models.choose_execution(CONFIG, "bfloat16", mesh, **how).rows_kernel for mesh in (mine, others)]
    assert chosen[0] == chosen[1] != "xla"


@pytest.mark.parametrize(("head_dim", "kernel"), [(128, "ragged"), (256, None)])
def test_heads_that_are_too_wide_for_pages_lie_in_slots_on_tpus(head_dim, kernel):
    """`scripts/planning/kernel_table.py` has the compiler's word for it."""
    mesh = Mesh(np.array(topology(hardware("v5e-1"))), ("data",), axis_types=(AxisType.Auto,))
    config, how = replace(CONFIG, head_dim=head_dim), {"row_axes": ("data",), "head_axes": (), "decodes": True}
    with nullcontext() if kernel else pytest.warns(RuntimeWarning, match="it supports head_dim up to 128"):
        chosen = models.choose_execution(config, "bfloat16", mesh, cache="auto", **how)
    assert chosen.pages_kernel == kernel


@pytest.mark.slow
def test_the_kernels_of_accelerators_pass(monkeypatch):
    monkeypatch.setitem(ROWS, "splash", partial(splash_rows, interpret=True))
    monkeypatch.setitem(DECODE, "pallas", partial(pallas_decode, interpret=True))
    assert choose(dtype="bfloat16") == ("splash", "pallas")


def test_a_kernel_is_tried_once_for_the_heads_of_a_device(monkeypatch):
    seen = []
    monkeypatch.setattr(kernel_choice, "_objection", lambda trial, devices_here: seen.append(trial.heads))
    for _ in range(2):
        choose(shape=(2, 1, 1), decodes=False)
        choose(shape=(1, 1, 2), decodes=False)
    assert seen == [(4, 2, 16), (2, 1, 16)]


def test_other_backends_and_those_who_ask_for_xla_get_it_untried(monkeypatch):
    monkeypatch.setitem(ROWS, "splash", raises)
    assert choose(wanted="xla") == ("xla", "xla")
    monkeypatch.delitem(kernel_choice.BEST, "cpu")
    assert choose() == ("xla", "xla")


BROKEN_ROWS = {
    "NotImplementedError: no such instruction$": raises,
    "its output is off by": lambda *arrays: xla_rows(*arrays[:3], jnp.ones_like(arrays[3])),
    "its gradient of keys is off by": lambda query, key, *rest: xla_rows(query, jax.lax.stop_gradient(key), *rest),
    "its output is off by nan": lambda *arrays: xla_rows(*arrays) * jnp.nan,
}


@pytest.mark.parametrize("reason", BROKEN_ROWS)
def test_a_broken_kernel_of_rows_is_replaced_loudly_and_once(reason, monkeypatch):
    monkeypatch.setitem(ROWS, "splash", BROKEN_ROWS[reason])
    message = rf"attention kernel 'splash' \(rows\) is not used on cpu for heads 4 x 2 x 16 in bfloat16, .*{reason}"
    with pytest.warns(RuntimeWarning, match=message):
        assert choose(dtype="bfloat16", decodes=False) == ("xla", "xla")
    assert choose(dtype="bfloat16", decodes=False) == ("xla", "xla")  # a second warning would be an error


def test_a_broken_decode_kernel_is_replaced_loudly(monkeypatch):
    monkeypatch.setitem(DECODE, "pallas", lambda *arrays: xla_decode(*arrays[:3], arrays[3] - 1, *arrays[4:]))
    with pytest.warns(RuntimeWarning, match=r"attention kernel 'pallas' \(decode\) is not used .*its output is off by"):
        assert choose() == ("splash", "xla")


def test_a_kernel_is_refused_where_its_backend_is_not(monkeypatch):
    monkeypatch.setitem(kernel_choice.BEST, "cpu", ("flash", "xla", "xla"))
    with pytest.warns(RuntimeWarning, match="'flash'"):
        assert choose(dtype="bfloat16") == ("xla", "xla")


def test_a_kernel_is_tried_with_the_windows_of_the_model(monkeypatch):
    monkeypatch.setitem(ROWS, "splash", lambda *arrays: xla_rows(*arrays[:4]))
    assert choose(decodes=False)[0] == "splash"
    with pytest.warns(RuntimeWarning, match="'splash'.*its output is off by"):
        assert choose(replace(CONFIG, sliding_window=1000), decodes=False)[0] == "xla"


def test_latents_are_decoded_by_the_kernel_that_reads_them():
    latent = LatentAttention(rank=8, rope_dim=4, value_dim=12)
    with pytest.warns(RuntimeWarning, match=r"'pallas' \(decode\) is not used .* it does not support latent attention"):
        assert choose(replace(CONFIG, latent=latent)) == ("splash", "xla")


@pytest.mark.parametrize(("chip", "kernels"), [("h100", ("flash", "pallas")), ("v5e-1", ("xla", None))])
def test_sinks_have_the_kernels_that_know_of_them(chip, kernels, recwarn):
    mesh = Mesh(np.array(topology(hardware(chip))[:1]), ("data",), axis_types=(AxisType.Auto,))
    how = {"row_axes": ("data",), "head_axes": (), "decodes": True, "cache": "auto"}
    execution = models.choose_execution(replace(CONFIG, attention_sinks=True), "bfloat16", mesh, **how)
    assert (execution.rows_kernel, execution.pages_kernel) == kernels
    assert any("not support attention sinks" in str(warning.message) for warning in recwarn) == (kernels[0] == "xla")


def test_a_cache_lies_in_pages_where_a_kernel_reads_them(monkeypatch):
    assert choose(cache="auto") == ("xla", "pallas")
    assert choose(cache="slots") == ("pallas", None)
    assert choose(cache="auto", decodes=False) == ("xla", None)
    monkeypatch.setitem(PAGES, "pallas", partial(pallas_pages, interpret=True))
    kernel_choice._usable.cache_clear()
    assert choose(cache="pages", dtype="bfloat16") == ("xla", "pallas")


def test_a_broken_kernel_of_pages_gives_slots_back_loudly(monkeypatch):
    monkeypatch.setitem(PAGES, "pallas", lambda *arrays: xla_pages(*arrays[:3], arrays[3] // 2, *arrays[4:]))
    with pytest.warns(RuntimeWarning, match=r"attention kernel 'pallas' \(pages\) is not used .*its output is off by"):
        assert choose(cache="auto") == ("pallas", None)
    assert choose(cache="pages") == ("xla", "xla")  # who insists gets what is right


def test_pages_that_nothing_reads_fast_are_had_by_those_who_ask_for_them(monkeypatch):
    assert choose(wanted="xla", cache="auto") == ("xla", None)
    assert choose(wanted="xla", cache="pages") == ("xla", "xla")
    monkeypatch.delitem(kernel_choice.BEST, "cpu")
    assert choose(cache="auto") == ("xla", None)
    assert choose(cache="pages") == ("xla", "xla")


def test_latents_and_stages_stay_in_slots(recwarn):
    latent = replace(CONFIG, latent=LatentAttention(rank=8, rope_dim=4, value_dim=12))
    assert choose(latent, cache="auto") == ("xla", None)
    assert choose(shape=(1, 2, 1), cache="auto") == ("pallas", None)
    assert not any("(pages)" in str(warning.message) for warning in recwarn)
    with pytest.raises(
        ValueError, match="cache='pages' is not supported, because latent attention has no cache in pages"
    ):
        choose(latent, cache="pages")
    with pytest.raises(ValueError, match="layers split over stages have their cache in slots"):
        choose(shape=(1, 2, 1), cache="pages")


def test_stages_have_the_kernels_that_others_have():
    assert choose(shape=(1, 2, 1)) == ("splash", "pallas")


def table(cache="slots"):
    """Name to value and what it follows from, of each section of a pool with an actor."""
    pool, config = ResourcePool("all", tuple(jax.devices()[:1])), get_config()
    config = replace(config, rollout=replace(config.rollout, cache=cache))
    builder = Builder(config, embedded_tokenizer(), pool, ("actor",), progress=lambda *_: None)
    return {(section, name): rest for section, name, *rest in pool_rows(builder)}


def test_a_run_tries_kernels_when_its_workers_are_built_and_its_table_names_them(monkeypatch):
    why = "attention='auto' on cpu"
    fast = table()
    assert fast["actor", "attention"] == ["rows=splash", why]
    assert fast["generation", "attention"] == ["rows=splash, decode=pallas", why]
    assert table("auto")["generation", "attention"] == ["rows=splash, pages=pallas", why]
    kernel_choice._usable.cache_clear()
    monkeypatch.setitem(ROWS, "splash", raises)
    with pytest.warns(RuntimeWarning, match="'splash'"):
        slow = table()
    assert slow["actor", "attention"] == ["rows=xla", why]
    assert slow["generation", "attention"] == ["rows=xla, decode=pallas", why]
    (less, unit), (more, same) = (rows["actor", "activations"][0].split() for rows in (fast, slow))
    assert unit == same and float(less) < float(more)  # scores are not kept


@pytest.mark.parametrize(("program", "kernel"), [("packed", "splash"), ("prefill", "splash"), ("decode", "pallas")])
def test_programs_compute_with_the_kernels_they_are_given(program, kernel, monkeypatch):
    for table, name in ((ROWS, "splash"), (DECODE, "pallas")):
        monkeypatch.setitem(table, name, raises)
    sizes = {"replicas": 1, "most_stop_tokens": 1, "tokens_per_dispatch": 2}

    def trace(execution):
        shape = programs.Shape(config=CONFIG, **sizes, execution=execution)
        rows, length = jnp.ones((2, 16), jnp.int32), jnp.ones(2, jnp.int32)
        if program == "packed":

            def run(params):
                return models.hidden_states(params, CONFIG, rows, rows, rows, execution=execution).hidden_RWD
        elif program == "prefill":
            run = partial(programs.prefill, layers=None, token_PS=rows, length_P=length, shape=shape)
        else:
            cache = cache_programs.empty_cache(slots=2, capacity=32, shape=shape)
            slots = programs.empty_slots(slots=2, shape=shape)

            def run(params):
                return programs.decode(programs.unstack(params, shape=shape), params, cache, slots, shape=shape)

        jax.eval_shape(run, models.param_shapes(CONFIG, "lm"))

    others = {"splash": Execution(decode_kernel="pallas"), "pallas": Execution(rows_kernel="splash")}
    trace(others[kernel])
    with pytest.raises(NotImplementedError, match="no such instruction"):
        trace(Execution(rows_kernel="splash", decode_kernel="pallas"))
