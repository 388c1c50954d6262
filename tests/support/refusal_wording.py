"""The wording of refusals: what a test's blocks raise is held against `golden/refusals.json`.

After a change of words that is meant: `python -m pytest -n0 --update-refusals tests/engine/test_rings.py`.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrlhf.config import Refusal

GOLDEN = Path(__file__).parents[1] / "golden" / "refusals.json"


class Wording:
    """The refusals of one test, in the order in which they come.

    Args:
      test: File and name of the test, by which the golden knows it.
      temporary: Folder of pytest; each of its own folders reads `<tmp>` in the golden.
      update: Write the golden and compare nothing.
    """

    def __init__(self, test: str, temporary: Path, *, update: bool) -> None:
        self._test, self._update = test, update
        self._folder = re.compile(re.escape(str(temporary)) + r"/[\w.-]*\d\b")
        self._said: list[str] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[pytest.ExceptionInfo[Refusal]]:
        """A block that has to end with a `Refusal`, in the golden's words."""
        with pytest.raises(Refusal) as raised:
            yield raised
        self.check(str(raised.value))

    def check(self, words: str) -> None:
        """Hold words against the golden's next."""
        self._said.append(self._folder.sub("<tmp>", words))
        if not self._update:
            golden = json.loads(GOLDEN.read_text()).get(self._test, [])[: len(self._said)]
            assert self._said == golden, f"other words than in {GOLDEN}; see refusal_wording.py"

    def close(self) -> None:
        """Write what was said, or make sure that the golden knows no more."""
        golden: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        if self._update:
            golden = dict(sorted({**golden, self._test: self._said}.items()))
            GOLDEN.write_text(json.dumps(golden, indent=2, ensure_ascii=False) + "\n")
        elif self._said:  # a test that failed before is told so already
            assert len(self._said) == len(golden.get(self._test, [])), "the golden knows more refusals of this test"
