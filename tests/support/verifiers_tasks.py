"""Environments of verifiers and their adapters, as a user names them."""

import sys
from pathlib import Path

import verifiers.v1 as vf

from jaxrlhf.environments.verifiers import Verifiers

sys.path.append(str(Path(__file__).parent))  # a taskset is named as the package that it is
DIGITS = {"id": "verifiers-digits"}


def digits_with(**agent):
    settings = {"taskset": DIGITS, "agent": {"runtime": {"type": "subprocess"}} | agent}
    return Verifiers(vf.load_environment(vf.resolve_env_config(settings)))


asked, null = digits_with(), digits_with(harness={"id": "null"})
