"""The switch and the hand-over on a mesh that spans two processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "switching_process.py"
TIMEOUT_S = 120


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.mark.slow
def test_each_process_generates_on_its_own_island() -> None:
    port = free_port()
    command = [sys.executable, str(SCRIPT), str(port)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "NPROC": "32"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], env=environment, **pipes) for rank in range(2)]
    try:
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
            assert f"process {rank} is done" in output
    finally:
        for process in processes:
            process.kill()
