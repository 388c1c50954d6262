"""The package's command lines, run in the process of a test."""

import runpy
import sys

import pytest


def run_module(module: str, *arguments: object) -> None:
    """Run `python -m jaxrlhf.<module>` in this process, whoever imported it before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *map(str, arguments)])
        patch.delitem(sys.modules, f"jaxrlhf.{module}", raising=False)
        runpy.run_module(f"jaxrlhf.{module}", run_name="__main__")
