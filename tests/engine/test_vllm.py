"""A run whose responses come from vLLM itself, on CPU, where an interpreter has it."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import seeing
from tiny_runs import records, served_config, training, write_policy

import jaxrlhf
from jaxrlhf.config import GRPO, Lora, RolloutServer, Sampling

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
DROPPED = ("PYTHON", "JAX", "XLA")  # the other interpreter finds its own packages
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
ENVIRONMENT |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
START_S = 600
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="vllm is not installed; VLLM_PYTHON may name an interpreter that has it"),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A model with heads of 32, the least that vLLM has on CPU, and defaults for sampling that a run has to undo."""
    folder = write_policy(tmp_path_factory.mktemp("served") / "policy", hidden_size=128)
    defaults = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(defaults | {"repetition_penalty": 1.5, "top_k": 5}))
    return folder


@pytest.fixture(scope="module")
def address(policy):
    """Address of a vLLM that serves it in float32."""
    with served(policy) as address:
        yield address


@contextmanager
def served(policy):
    """Address of a vLLM that serves a policy in float32."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = {"model": policy, "dtype": "float32", "max-model-len": 128, "logprobs-mode": "processed_logprobs"}
    flags |= {"host": "127.0.0.1", "port": port}
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--enable-scale-out"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    log = policy.parent / "vllm.log"
    with log.open("w") as written:
        server = subprocess.Popen(command, env=ENVIRONMENT, stdout=written, stderr=written, start_new_session=True)
    try:
        for _ in range(START_S):
            assert server.poll() is None, log.read_text()[-4000:]
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(1)
        else:
            raise AssertionError(log.read_text()[-4000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.mark.parametrize(("weights", "lora"), [("whole", None), ("changed", Lora(rank=2))])
def test_vllm_generates_for_a_run(address, policy, tmp_path, weights, lora):
    server = RolloutServer((address,), weights=weights)
    config = served_config(policy, tmp_path, server, sampling=Sampling(temperature=0.7))
    learned = {"algorithm": GRPO(responses_per_update=8), "actor": replace(training(), lora=lora)}
    jaxrlhf.run(replace(config, steps=4, **learned))
    steps = [record for record in records(tmp_path / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    # vLLM's log-probabilities are those of the weights that each step trains, at the temperature.
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in steps)
    assert all(record["actor/grad_norm"] > 0 for record in steps)
    layers = (policy / "model.safetensors").stat().st_size - 4 * 2 * 448 * 128  # without embeddings and head
    assert all((record["server/read_bytes"] < layers) == (weights == "changed") for record in steps[1:])
    with urllib.request.urlopen(f"{address}/weight_info", timeout=30) as answer:
        assert json.load(answer)["weight_version"].startswith(str(tmp_path / "server_weights" / "version_4"))


def test_vllm_sees_the_images_of_a_run(tmp_path):
    """And its features of an image are computed again after each reload."""
    if subprocess.run([PYTHON, "-c", "import torchvision"], env=ENVIRONMENT, capture_output=True).returncode:
        pytest.skip("vLLM needs torchvision for models with images")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    sizes = {"hidden_size": 128, "rope_parameters": rope}  # heads of 32, as in `policy`
    policy = seeing.write_policy(tmp_path / "policy", {"hidden_size": 64, "out_hidden_size": 128}, **sizes)
    config = seeing.run_config(policy, tmp_path)
    with served(policy) as address:
        server = RolloutServer((address,), weights="changed")
        jaxrlhf.run(replace(config, rollout=replace(config.rollout, server=server)))
    steps = [record for record in records(tmp_path / "run" / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in steps)
