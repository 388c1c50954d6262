"""Calibration: what is counted, how constants are fitted, and what the command writes."""

import itertools
import json
import math
import random
import re
import time
from dataclasses import asdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import collectives
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf import models
from jaxrlhf.config import run_command
from jaxrlhf.planner.hardware import Hardware, load_hardware, save_hardware
from scripts.planning import calibrate as command
from scripts.planning.calibration import calibrate, measure
from scripts.planning.calibration.calibrate import measured_rows, quantity
from scripts.planning.calibration.measure import RateSample, fit_link, ring_sample

# Fitting.


def sampled(latency_s: float, bytes_per_s: float) -> list[RateSample]:
    """What a ring with these constants would take, by group and size."""
    return [
        RateSample(steps, size, steps * latency_s + size / bytes_per_s)
        for steps, size in itertools.product((1, 3, 7, 14), (4e3, 60e3, 1e6, 20e6))
    ]


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-6, 450e9), (2e-3, 1e8)])
def test_the_fit_recovers_the_constants_of_exact_samples(latency_s: float, bytes_per_s: float) -> None:
    assert fit_link(sampled(latency_s, bytes_per_s)) == pytest.approx((latency_s, bytes_per_s), rel=1e-6)


def test_the_fit_stands_noise_and_a_disturbed_sample() -> None:
    noise = random.Random(0)
    noisy = [each._replace(seconds=each.seconds * math.exp(noise.gauss(0, 0.1))) for each in sampled(30e-6, 2e9)]
    disturbed = [noisy[0]._replace(seconds=50 * noisy[0].seconds), *noisy[1:]]
    assert fit_link(noisy) == pytest.approx((30e-6, 2e9), rel=0.15)
    assert fit_link(disturbed) == pytest.approx((30e-6, 2e9), rel=0.15)


def test_two_samples_that_no_latency_explains_still_give_constants_above_zero() -> None:
    """The smaller one has the better rate, as in a cache."""
    latency_s, bytes_per_s = fit_link([RateSample(16, 1e6, 1e-3), RateSample(8, 1e8, 0.2)])
    assert 0 < latency_s < 1e-3 / 16
    assert 1e8 / 0.2 <= bytes_per_s <= 1e6 / 1e-3


@pytest.mark.parametrize("samples", [[RateSample(1, 1e3, 1e-3)], [RateSample(1, 1e3, 1e-3), RateSample(1, 2e3, 0.0)]])
def test_a_fit_of_too_little_is_refused(refused, samples: list[RateSample]) -> None:
    with refused():
        fit_link(samples)


# Counting.


@pytest.mark.parametrize("group", [2, 3])
def test_collectives_are_counted_as_rings_run(group: int) -> None:
    """Chunks go round one by one until every device has had every other's."""
    chunk = 120 / group
    has = [{device} for device in range(group)]
    steps = 0
    while any(len(held) < group for held in has):
        has = [has[device] | {(device - 1 - steps) % group} for device in range(group)]
        steps += 1
    assert ring_sample("all-gather", group, 120, 1.0) == pytest.approx((steps, steps * chunk, 1.0))
    # A sum goes round once as parts, and once more as the whole.
    assert ring_sample("all-reduce", group, 120, 1.0) == pytest.approx((2 * steps, 2 * steps * chunk, 1.0))


SIZE = calibrate.DecoderSize(256, 3, 2, 5)
MODEL = SIZE.model


def test_products_of_training_are_those_of_every_matrix_and_score() -> None:
    shapes = models.param_shapes(MODEL, "lm")
    layers = [leaf.shape for leaf in jax.tree.leaves(shapes["layers"])]
    matrices = [math.prod(shape) for shape in layers if len(shape) > 2] + [math.prod(shapes["embed"].shape)]
    scores = 0
    for _layer, _row, _query, _key in itertools.product(range(3), range(2), range(5), range(5)):
        scores += 2 * 2 * 4 * 64  # a product with the key and one with the value, in 4 heads of 64
    # Half of them, for the mask hides the others.
    assert calibrate.training_flops(SIZE) == 3 * (2 * sum(matrices) * 2 * 5 + scores / 2)


def test_bytes_of_decoding_are_the_matrices_and_the_cache() -> None:
    shapes = models.param_shapes(MODEL, "lm", jnp.bfloat16)
    weights = sum(leaf.size for leaf in jax.tree.leaves(shapes) if len(leaf.shape) > 1 and leaf.shape != (3, 256))
    cache = jax.eval_shape(
        lambda: models.empty_cache(MODEL, slots=2, capacity=5, execution=models.Execution(jnp.bfloat16))
    )
    expected = weights * 2 + sum(leaf.size * 2 for leaf in jax.tree.leaves(cache))
    assert calibrate.decode_bytes(SIZE, itemsize=2) == expected


def test_groups_fill_the_devices() -> None:
    assert [measure.group_sizes(devices) for devices in (3, 8, 12)] == [[3], [2, 4, 8], [2, 4, 12]]


def test_sizes_fit_the_time_and_the_memory() -> None:
    h200 = {"memory_bytes": 141e9, "itemsize": 2, "seconds": 4.0}
    train, decode = calibrate.choose_training, calibrate.choose_decoding
    assert train(flops_per_s=800e12, **h200) == calibrate.TRAININGS[-1]
    assert decode(bytes_per_s=4e12, **h200) == calibrate.DECODINGS[-1]
    small = h200 | {"memory_bytes": 16e9}
    assert train(flops_per_s=800e12, **small) != calibrate.TRAININGS[-1]
    assert decode(bytes_per_s=4e12, **small) != calibrate.DECODINGS[-1]
    hurried = h200 | {"seconds": 1e-6}
    assert train(flops_per_s=800e12, **hurried) == calibrate.TRAININGS[0]
    assert decode(bytes_per_s=4e12, **hurried) == calibrate.DECODINGS[0]


# Timing.


def test_a_figure_is_the_median_after_a_first_call() -> None:
    naps = iter([0.2, 0.01, 0.1, 0.012])
    assert 0.012 <= measure.timed(lambda: time.sleep(next(naps)), seconds=None) < 0.1
    assert next(naps, None) is None


def test_sizes_grow_while_the_next_one_fits() -> None:
    built: list[int] = []

    def build(size: int):
        built.append(size)
        return lambda: time.sleep(size * 1e-3)

    found = measure.climb([1, 4, 16, 1000], build, work=float, seconds=0.5)
    assert [each.size for each in found] == built == [1, 4, 16]
    assert [each.seconds for each in found] == pytest.approx([1e-3, 4e-3, 16e-3], rel=2)
    assert [each.size for each in measure.climb([1, 2], build, work=float, seconds=1e-6, fewest=2)] == [1, 2]


# On devices.


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_a_program_of_collectives_runs_them(kind: measure.Kind) -> None:
    grid = np.asarray(jax.devices()).reshape(2, 4)
    mesh = Mesh(grid, ("apart", "group"), axis_types=(AxisType.Auto,) * 2)
    given = np.arange(8 * 8, dtype=np.float32).reshape(2, 4, 8)
    split = NamedSharding(mesh, PartitionSpec(("apart", "group")))
    held = jax.device_put(given.reshape(8, 8), split)
    program = measure.collective_program(mesh, kind, 1)
    found = collectives(jax.jit(program).lower(held))
    assert [(each.kind, each.groups) for each in found] == [(kind, {frozenset(range(4)), frozenset(range(4, 8))})]
    if kind == "all-reduce":
        expected = np.broadcast_to(given.mean(axis=1, keepdims=True), given.shape)
    else:
        gathered = given[:, :, :2].reshape(2, 8)
        expected = np.stack([[row for _ in range(4)] for row in gathered])
        for apart, device in np.ndindex(2, 4):
            following = (device + 1) % 4
            expected[apart, device, :2] = gathered[apart, 2 * following : 2 * following + 2]
    np.testing.assert_allclose(np.asarray(program(held)).reshape(2, 4, 8), expected)


@pytest.mark.slow
def test_cpu_devices_are_measured(tmp_path) -> None:
    told: list[tuple[str, int, int]] = []
    progress = lambda *call: told.append(call)  # noqa: E731
    measured = calibrate.calibrate(jax.devices(), seconds_per_figure=0.01, progress=progress)
    save_hardware(measured, tmp_path / "measured.json")
    assert load_hardware(tmp_path / "measured.json") == measured
    fields = asdict(measured)
    figures = {name: value for name, value in fields.items() if isinstance(value, float)}
    assert len(figures) == 14
    assert [name for name, value in figures.items() if not 0 < value < math.inf] == []
    assert [name for name, value in figures.items() if "efficiency" in name and value > 1] == []
    # A processor does between a million and a hundred trillion a second.
    rates = ["matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s"]
    assert [name for name in rates if not 1e6 < figures[name] < 1e14] == []
    assert (measured.machines, measured.devices_per_machine, measured.shared_compute) == (1, 8, True)
    assert measured.network_bytes_per_s == measured.link_bytes_per_s
    assert measured.name == "cpu-measured"
    assert measured.usable_memory == 0.95
    assert re.match(r"measured on cpu x 8, jax \d.*, \d{4}-\d\d-\d\d; one machine: network", measured.source)
    assert told[0][1:] == (0, 8) and told[-1][1:] == (8, 8)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


# From figures to hardware, with the devices made up.


def made_up(
    count: int, *, processes: int = 1, device_kind: str = "NVIDIA H200", platform: str = "gpu"
) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            id=index,
            device_kind=device_kind,
            platform=platform,
            process_index=index * processes // count,
            memory_stats=lambda: {"bytes_limit": 100 * 10**9},
        )
        for index in range(count)
    ]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that do 500 TFLOP/s and 4 TB/s, in training 200 TFLOP/s, in decoding 3 TB/s and 50 us a layer."""
    for name, value in {
        "dispatch_s": 1e-4,
        "matmul_flops_per_s": 500e12,
        "memory_bytes_per_s": 4e12,
        "host_bytes_per_s": 5e10,
    }.items():
        monkeypatch.setattr(measure, name, lambda *args, value=value, **kwargs: value)
    monkeypatch.setattr(measure, "link_samples", lambda *args, **kwargs: sampled(5e-6, 300e9))
    monkeypatch.setattr(measure, "network_samples", lambda *args, **kwargs: sampled(20e-6, 20e9))

    def decode_sample(devices, size, **_: object) -> RateSample:
        read = 1e6 * size.hidden
        return RateSample(size.layers, read, 50e-6 * size.layers + read / 3e12)

    def training_s(devices, size, **_: object) -> float:
        return calibrate.training_flops(size) / 200e12

    monkeypatch.setattr(calibrate, "decode_sample", decode_sample)
    monkeypatch.setattr(calibrate, "training_s", training_s)


def quietly(devices: list) -> Hardware:
    return calibrate.calibrate(devices, seconds_per_figure=4.0, progress=lambda *_: None)


@pytest.mark.usefixtures("figures")
def test_shares_and_links_follow_from_the_figures() -> None:
    found = quietly(made_up(8, processes=2))
    assert found.name == "h200-measured"
    assert (found.machines, found.devices_per_machine, found.shared_compute) == (2, 4, False)
    assert found.memory_bytes == 100e9
    assert (found.matmul_efficiency, found.memory_efficiency) == pytest.approx((0.4, 0.75))
    assert found.layer_overhead_s == pytest.approx(50e-6)
    assert (found.link_latency_s, found.link_bytes_per_s) == pytest.approx((5e-6, 300e9))
    assert (found.network_latency_s, found.network_bytes_per_s) == pytest.approx((20e-6, 20e9))
    assert found.link_efficiency == 1
    assert found.usable_memory == 0.95
    assert "taken" not in found.source and "NVIDIA H200 x 8" in found.source


@pytest.mark.usefixtures("figures")
def test_a_device_alone_has_the_link_of_its_datasheet_or_one_as_fast_as_its_memory() -> None:
    found = quietly(made_up(1))
    assert found.link_bytes_per_s == pytest.approx(450e9 * 0.8)
    assert found.network_bytes_per_s == found.link_bytes_per_s
    assert "one device: link as `--hardware h200` has it" in found.source
    assert "network taken as the link" in found.source

    unknown = quietly(made_up(1, device_kind="Some Card 3"))
    assert unknown.name == "some-card-3-measured"
    assert (unknown.link_bytes_per_s, unknown.link_latency_s) == (4e12, 1e-4)
    assert "one device: link taken to be as fast as its memory" in unknown.source


def test_what_cannot_be_described_is_refused(refused) -> None:
    with refused():
        quietly(made_up(3, processes=2))
    with refused():
        calibrate.calibrate(jax.devices(), seconds_per_figure=0, progress=lambda *_: None)


# The command.

MEASURED = Hardware("x-measured", 1, 8, 8e10, 3.12e14, 2.039e12, 3e11, 3.125e9, 2.5e10, 1e-5, 2.57e-5, 3e-5, 5e-4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the command asks to be measured; the answer is `MEASURED`."""
    asked: dict = {}

    def answer(devices, *, seconds_per_figure: float, progress) -> Hardware:
        asked.update(devices=devices, seconds=seconds_per_figure)
        progress("links", 1, 8)
        return MEASURED

    monkeypatch.setattr(calibrate, "calibrate", answer)
    return asked


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["calibrate", *words])
    run_command(command.main)


def test_the_command_writes_a_file_and_says_how_to_use_it(asked, monkeypatch, tmp_path, capsys) -> None:
    out = tmp_path / "here.json"
    run(monkeypatch, "--out", str(out), "--devices", "4", "--seconds", "0.5")
    assert asked == {"devices": jax.devices()[:4], "seconds": 0.5}
    assert load_hardware(out) == MEASURED
    assert json.loads(out.read_text())["name"] == "x-measured"
    printed = capsys.readouterr().out
    assert "312 TFLOP/s" in printed and "2.04 TB/s" in printed and "25.7 us" in printed and "cpu: " in printed
    assert f"python -m jaxrlhf.plan --config NAME --hardware {out}" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "/no/such/folder/x.json"], "there is no folder '/no/such/folder'; create it, or choose another"),
        (["--out", "hardware.txt"], "--out must be a file that ends in .json, got 'hardware.txt'"),
        (["--seconds", "0"], "--seconds must be above 0 and at most 600, got 0.0"),
        (["--devices", "0"], "--devices must be 1 or more, got 0"),
        (["--devices", "9"], "--devices 9 was asked for and JAX sees 8 cpu devices; give fewer"),
        (["--devices", "2", "--multihost"], "several hosts use all of their devices"),
        (["--multihost"], "--multihost calls jax.distributed.initialize(), which failed with "),
    ],
)
def test_the_command_refuses_in_one_line(words, message, asked, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *words)
    refusal = capsys.readouterr().err
    assert refusal.startswith("error: ") and refusal.count("\n") == 1 and message in refusal
    assert not asked and not list(tmp_path.iterdir())


def test_rows_name_what_is_known_of_the_device() -> None:
    rows = measured_rows(MEASURED, None)
    assert {note for *_, note in rows} == {""}
    notes = {name: note for _, name, _, note in measured_rows(MEASURED, MEASURED)}
    assert notes["share in training"] == "x-measured: 50 %"
    assert notes["latency of a step"] == "x-measured: 10 us"


def test_quantities_have_three_digits_and_a_prefix() -> None:
    assert (quantity(2.25e15, "FLOP/s"), quantity(1.0, "s"), quantity(2e-8, "s")) == ("2.25 PFLOP/s", "1 s", "0.02 us")
