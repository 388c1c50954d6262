"""The environment that JAX starts in."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxrlhf.runtime import environment
from jaxrlhf.runtime.xla_flags import TPU_FLAGS, with_flags
from jaxrlhf.single_controller.launch import _check_threads


def threads_with(**variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    script = "import os, jaxrlhf; print(os.environ.get('NPROC'))"
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "variables, threads",
    [
        ({}, "None"),
        ({"JAX_NUM_CPU_DEVICES": "1"}, "None"),
        ({"JAX_NUM_CPU_DEVICES": "8"}, "32"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, "32"),
        ({"JAX_NUM_CPU_DEVICES": "8", "NPROC": "64"}, "64"),
    ],
)
def test_only_several_cpu_devices_get_more_threads_than_cores(variables, threads):
    assert threads_with(**variables) == threads


def test_the_flag_is_found_among_others(monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=4 --other=9")
    assert environment.cpu_devices() == 4


def test_too_few_threads_for_the_devices_are_refused_before_anything_hangs(monkeypatch):
    devices = [SimpleNamespace(platform="cpu")] * 8
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(ValueError, match="JAX_NUM_CPU_DEVICES=8"):
        _check_threads(devices)
    monkeypatch.setenv("NPROC", "32")
    _check_threads(devices)


def test_flags_are_added_to_those_that_the_user_gave():
    flags = {"xla_first": True, "xla_second": "4", "xla_third": "A,B"}
    assert with_flags("", flags) == "--xla_first=true --xla_second=4 --xla_third=A,B"
    assert with_flags("--xla_second=9 --mine=1", flags) == "--xla_second=9 --mine=1 --xla_first=true --xla_third=A,B"


def test_importing_the_package_sets_the_flags_of_tpus():
    assert with_flags(os.environ["LIBTPU_INIT_ARGS"], TPU_FLAGS) == os.environ["LIBTPU_INIT_ARGS"]


def test_compilers_of_absent_chips_are_not_looked_for():
    """With the compilers of `jaxrlhf[compile]` beside it, JAX starts on a machine without chips in silence."""
    if environment.chips_are_here():
        pytest.skip("a chip is here")
    clean = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    script = "import jaxrlhf, jax; print(jax.devices()[0].platform)"
    ran = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("cpu", "")


@pytest.mark.parametrize(
    "vendor, variables, here",
    [("0x1ae0", {}, True), ("0x8086", {}, False), ("0x8086", {"JAX_FORCE_TPU_INIT": "1"}, True)],
)
def test_chips_are_found_by_their_files_and_vendors(vendor, variables, here, tmp_path, monkeypatch):
    (tmp_path / "0000:00").mkdir()
    (tmp_path / "0000:00" / "vendor").write_text(vendor + "\n")
    monkeypatch.setattr(environment, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(environment, "_CHIP_FILES", (str(tmp_path / "nvidia0"),))
    monkeypatch.setattr(environment, "entry_points", lambda group: [SimpleNamespace(name="xla_cuda13")])
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.chips_are_here() == here
    (tmp_path / "nvidia0").touch()
    assert environment.chips_are_here()


def test_plugins_of_other_chips_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(environment, "_CHIP_FILES", ())
    monkeypatch.setattr(environment, "entry_points", lambda group: [SimpleNamespace(name="metal")])
    assert environment.chips_are_here()
