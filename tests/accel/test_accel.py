"""Kernels and a run from the command line on a GPU or TPU, each in its own process."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.accel

KERNELS = """
import json, warnings
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh
import jaxrlhf
from jaxrlhf import models
from jaxrlhf.models.attention.kernel_choice import BEST
from jaxrlhf.planner.shapes import SHAPES

warnings.simplefilter("error")
mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
found = []
for head_dim in (64, 128, 256):
    config = replace(SHAPES["Qwen/Qwen2.5-0.5B"], head_dim=head_dim, num_heads=8, num_kv_heads=4, num_layers=2)
    for cache in ("slots", "pages" if head_dim <= 128 else "slots"):
        chosen = models.choose_execution(
            config, jnp.bfloat16, mesh, row_axes=(), head_axes=(), decodes=True, cache=cache
        )
        found.append([chosen.rows_kernel, chosen.decode_kernel, chosen.pages_kernel])
print(json.dumps([jax.default_backend(), found]))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, without the settings of the tests."""
    ours = ("JAX_", "XLA_", "NPROC", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    finished = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished


def test_every_kernel_passes_its_try_out():
    backend, found = json.loads(run("-c", KERNELS).stdout.splitlines()[-1])
    rows, decode, pages = {"gpu": ("flash", "pallas", "pallas"), "tpu": ("splash", "xla", "ragged")}[backend]
    assert {each[0] for each in found} == {rows}
    for _, slots_kernel, pages_kernel in found:
        assert (slots_kernel, pages_kernel) in {(decode, None), ("xla", pages)}


def test_a_run_from_the_command_line_samples_as_it_trains(tmp_path):
    run("-m", "jaxrlhf.train", "--config", "grpo_arithmetic", "--steps", "3", "--workdir", str(tmp_path))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gaps = [record["sampler/logp_gap_mean"] for record in records if "sampler/logp_gap_mean" in record]
    assert len(gaps) == 3
    assert max(gaps) < 0.02  # of bfloat16; weights that did not arrive, or other positions, are nats away
