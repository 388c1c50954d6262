"""Attacks on what docs/security.md promises: their tests are there."""

import pytest

from scripts.pages import ROOT
from scripts.tools.attack import ATTACKS


@pytest.mark.parametrize("path", sorted({path for paths in ATTACKS.values() for path in paths}))
def test_tests_of_an_attack_exist(path):
    assert (ROOT / path).exists()
