"""Compiled programs of a plan: memory and collectives by the compilers of chips, and programs that do not fit."""

import json
from dataclasses import replace
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import run_module
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from made_plans import a_config
from rich.console import Console

from jaxrlhf.config import GRPO, Pool, Refusal, Rewards
from jaxrlhf.planner import check_fits, compiled_report, compiled_to_json, question_of
from jaxrlhf.planner.compiled import CompiledProgram, compile_programs, largest
from jaxrlhf.planner.cost.programs import ExpectedPrograms
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.hlo import Collective, collectives, product_flops
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.topology import topology

LAYERS, ROWS, WIDTH, INNER = 3, 64, 128, 256


def products(rows, weights):
    """A chain of layers whose weights are split over `fsdp` and `tensor`."""

    def layer(hidden, pair):
        return jnp.tanh(jnp.tanh(hidden @ pair[0]) @ pair[1]), None

    return jax.lax.scan(layer, rows, weights)[0]


@pytest.fixture(scope="module", params=["cpu", "h100x1", "v5p-16"])
def program(request):
    devices = jax.devices() if request.param == "cpu" else topology(hardware(request.param))
    mesh = Mesh(np.array(devices).reshape(4, 2), ("fsdp", "tensor"))

    dtype = jnp.float32 if request.param == "cpu" else jnp.bfloat16  # the dtype of collectives

    def given(shape, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    weights = (
        given((LAYERS, WIDTH, INNER), None, "fsdp", "tensor"),
        given((LAYERS, INNER, WIDTH), None, "tensor", "fsdp"),
    )
    run = jax.jit(products, out_shardings=NamedSharding(mesh, PartitionSpec("fsdp")))
    return run.lower(given((ROWS, WIDTH), "fsdp"), weights).compile(), jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(("name", "chips"), [("v5e-1", 1), ("v6e-4", 4)])
def test_a_slice_has_its_chips_also_one_alone(name, chips):
    assert len(topology(hardware(name))) == chips


def test_collectives_are_those_of_the_formula_on_every_compiler(program):
    compiled, itemsize = program
    found = collectives(compiled.as_text(), {"fsdp": 4, "tensor": 2})
    gathered = LAYERS * 2 * (3 / 4) * WIDTH * INNER / 2 * itemsize
    reduced = LAYERS * 2 * (1 / 2) * (ROWS / 4) * WIDTH * itemsize
    assert {(each.kind, each.axes, each.bytes) for each in found} == {
        ("all-gather", ("fsdp",), gathered),
        ("all-reduce", ("tensor",), reduced),
    }
    counts = {each.kind: each.count for each in found}
    assert counts["all-reduce"] == LAYERS and counts["all-gather"] in (LAYERS, 2 * LAYERS)  # two at a time, or alone


def test_operations_are_those_of_the_products_on_every_compiler(program):
    compiled, _ = program
    assert product_flops(compiled.as_text()) == LAYERS * 2 * 2 * (ROWS / 4) * WIDTH * INNER / 2


GROUPS = {
    "replica_groups={{0,1},{2,3},{4,5},{6,7}}": ("tensor",),
    "replica_groups={{0,2,4,6},{1,3,5,7}}": ("fsdp",),
    "replica_groups=[4,2]<=[8]": ("tensor",),
    "replica_groups=[2,4]<=[4,2]T(1,0)": ("fsdp",),
    "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}": ("fsdp",),
    "replica_groups=mesh['axis_0'=8] {'axis_0':(4)2}": ("tensor",),
    "replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}": ("fsdp",),
    "replica_groups={}": ("fsdp", "tensor"),
}


@pytest.mark.parametrize("written", GROUPS)
def test_groups_are_read_as_mesh_axes_in_every_way_that_they_are_written(written):
    line = f"  %r = f32[6]{{0}} all-reduce(%a), {written}, to_apply=%add"
    text = f"ENTRY %main (a: f32[6]) -> f32[6] {{\n  %a = f32[6]{{0}} parameter(0)\n{line}\n}}\n"
    [found] = collectives(text, {"fsdp": 4, "tensor": 2})
    ways = {("fsdp",): 4, ("tensor",): 2, ("fsdp", "tensor"): 8}[GROUPS[written]]
    assert found == Collective("all-reduce", GROUPS[written], 1, round(2 * 24 * (ways - 1) / ways))


def test_only_pairs_that_differ_are_sent():
    line = "  %r = bf16[10]{0} collective-permute(%a), source_target_pairs={{0,2},{2,0},{1,1}}"
    text = f"ENTRY %main (a: bf16[10]) -> bf16[10] {{\n  %a = bf16[10]{{0}} parameter(0)\n{line}\n}}\n"
    assert collectives(text, {"fsdp": 4, "tensor": 2}) == [Collective("collective-permute", ("fsdp",), 1, 20)]


def test_the_largest_of_several_sizes_stands_for_them():
    names = [
        "generation.decode[8, 96]",
        "generation.decode[8, 1024]",
        "actor.to_generation[0]",
        "actor.to_generation[1]",
    ]
    assert largest(names) == ["generation.decode[8, 1024]", "actor.to_generation[0]", "actor.to_generation[1]"]


def program_of(name: str, gib: float, beside: float) -> CompiledProgram:
    size = int(gib * 2**30)
    return CompiledProgram(name, 1.0, size, 0, size, size, size, size / 2, beside * 2**30, (), 0)


def test_a_step_that_its_compiler_does_not_fit_is_refused_with_the_figure():
    machines = replace(hardware("h100"), memory_bytes=80 * 2**30, usable_memory=0.9)
    fits = [program_of("critic.gradient", 40, 20), program_of("generation.decode[8, 96]", 30, 10)]
    check_fits(fits, machines)
    with pytest.raises(Refusal) as refusal:
        check_fits([*fits, program_of("actor.gradient", 60, 13)], machines)
    uncounted = replace(program_of("actor.gradient", 60, 13), needed_bytes=0)
    with pytest.raises(Refusal, match=r"actor\.gradient needs 60 GiB according"):
        check_fits([uncounted], machines)
    assert str(refusal.value) == (
        "the step does not fit h100: actor.gradient needs 60 GiB according to its compiler (plans count 30 GiB for "
        "it), and everything else takes 13 GiB; a plan may fill 72 GiB of a device. Fewer tokens_per_microbatch, "
        "remat='full', or a layout that splits the role further would help"
    )


class Compiled:
    """Compiled program with arguments and outputs of one size."""

    def __init__(self, size: int) -> None:
        self.argument_size_in_bytes = self.output_size_in_bytes = size
        self.temp_size_in_bytes = self.alias_size_in_bytes = 0
        self.peak_memory_in_bytes = 2 * size
        self.input_shardings = self.output_shardings = ()

    def compile(self, **options: object) -> "Compiled":
        return self

    def memory_analysis(self) -> "Compiled":
        return self

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("this compiler cannot print it")


@pytest.mark.parametrize("apart", [False, True], ids=["among others", "a pool of their own"])
def test_weights_on_their_way_into_generation_are_counted_once(apart):
    pools = (Pool("train", 2, ("actor",)), Pool("generate", 2, ("rollout",))) if apart else ()
    config = a_config(algorithm=GRPO(responses_per_update=32), rewards=Rewards(), pools=pools)
    problem = question_of(config, replace(hardware("h100"), devices_per_machine=4)).problem
    expected = ExpectedPrograms(problem, search(problem).plans[0])
    leaf, decode = 2**20, expected.of("generation.decode")
    names = ("generation.unstack[0, layers]", "actor.to_generation[0]")
    options = {name: Compiled(leaf) for name in names}
    apart_leaf, gathered = compile_programs(options, expected, options=None)
    weights = expected.of("generation.insert").beside - decode.beside
    assert weights > leaf and decode.beside >= 0
    assert apart_leaf.peak_bytes == pytest.approx(decode.beside + weights + leaf), "one leaf is there twice"
    if apart:
        assert gathered.peak_bytes == pytest.approx(expected.of("actor.zero gradient").beside + leaf)
    else:
        assert gathered.peak_bytes == pytest.approx(decode.beside + weights), "and the layouts are one after another"


def test_the_report_says_what_is_fullest_and_what_travels():
    machines = replace(hardware("h100"), memory_bytes=80 * 2**30, usable_memory=0.9)
    moved = Collective("all-gather", ("fsdp",), 56, 3 * 2**30)
    programs = [replace(program_of("actor.gradient", 40, 20), collectives=(moved,)), program_of("actor.forward", 4, 20)]
    console = Console(width=150, file=StringIO())
    console.print(compiled_report(programs, machines))
    shown = console.file.getvalue()
    assert "compiled for 8 devices (1 machine of 8 x h100), GiB per device" in shown
    assert "56 all-gather over fsdp 3.00 GiB" in shown
    assert "fullest: actor.gradient, 60.0 of the 72.0 GiB that a plan may fill; all 2 programs compiled in 2 s" in shown
    assert compiled_to_json(programs, machines)["fits"]
    smaller = compiled_to_json(programs, replace(machines, memory_bytes=50 * 2**30))
    assert not smaller["fits"] and smaller["does_not_fit"] == ["actor.gradient"]


def test_the_report_cuts_no_name_and_no_figure_in_80_columns():
    programs = [
        program_of("generation.resize[256, 896, 256, 1024]", 40, 20),
        program_of("actor.optimizer state", 41, 20),
    ]
    console = Console(width=80, file=StringIO())
    console.print(compiled_report([replace(each, flops=8 * 10**8) for each in programs], hardware("h100")))
    shown = console.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for text in ("generation", "1024]", "optimizer", "40.00", "41.00", "20.50", "0.0008", "least s", "0.026"):
        assert text in shown


def test_the_best_seconds_are_of_what_takes_longest():
    machines = replace(hardware("h100"), memory_bytes_per_s=2**40, link_bytes_per_s=2**39, matmul_flops_per_s=1e15)
    reads = program_of("actor.forward", 64, 0)  # and writes as many bytes
    assert reads.seconds_at_best(machines) == 2 * 64 / 1024
    sends = replace(reads, collectives=(Collective("all-gather", ("fsdp",), 1, 2**37),))
    assert sends.seconds_at_best(machines) == 1 / 4
    assert replace(sends, flops=int(2e15)).seconds_at_best(machines) == 2


CONFIGURATION = """
from dataclasses import replace
from jaxrlhf.config import FromScratch, ModelReward, Rewards, load, override

def get_config():
    small = FromScratch(hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=2)
    changes = {"cold_start": None, "devices": None, "compute_dtype": "bfloat16", "model": small, "algorithm.kl": None}
    changes["rewards"] = Rewards(parts=(ModelReward("Qwen/Qwen2.5-0.5B"),))  # only the shape is needed
    return override(load("grpo_arithmetic"), changes)
"""


def test_json_of_programs_that_do_not_fit_is_printed_before_the_command_fails(monkeypatch, capsys):
    monkeypatch.setattr(
        "jaxrlhf.trainer.programs.compile_plan", lambda *_, **__: [program_of("actor.gradient", 60, 40)]
    )
    arguments = "--config grpo_gsm8k --hardware h100 --plans 1 --compile --json"
    with pytest.raises(SystemExit) as end:
        run_module("plan", *arguments.split())
    told = capsys.readouterr()
    assert json.loads(told.out)["compiled"]["does_not_fit"] == ["actor.gradient"]
    assert end.value.code == 2 and "the step does not fit h100: actor.gradient needs 60 GiB" in told.err


@pytest.mark.slow
def test_the_command_compiles_every_program_of_the_best_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CONFIGURATION)
    arguments = (
        "--config",
        "mine",
        "--hardware",
        "h100x1x2",
        "--plans",
        1,
        "--compile",
        "--json",
    )
    run_module("plan", *arguments)
    compiled = json.loads(capsys.readouterr().out)["compiled"]
    programs = {program["name"].partition("[")[0]: program for program in compiled["programs"]}
    wanted = ("generation.decode", "generation.prefill", "actor.gradient", "actor.optimizer update", "reward.forward")
    assert set(wanted) <= programs.keys()
    for program in programs.values():
        parts = [program[f"{name}_bytes"] for name in ("argument", "temporary", "output")]
        assert program["compiled_bytes"] == sum(parts) - program["alias_bytes"] > 0
        assert program["seconds"] > 0 and program["peak_bytes"] == program["needed_bytes"] + program["beside_bytes"]
        assert 0.9 * program["compiled_bytes"] < program["needed_bytes"] <= program["compiled_bytes"], "a GPU"
    assert programs["actor.optimizer update"]["estimated_bytes"] == pytest.approx(
        programs["actor.optimizer update"]["compiled_bytes"], rel=0.01
    )
    assert compiled["fits"] and compiled["peak_bytes"] < compiled["usable_bytes"]
