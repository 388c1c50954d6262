"""Rewrite the golden of every shipped configuration, after a change to one that is meant.

    python scripts/update_goldens.py

`git diff tests/golden_configs` then shows what the change does to each run.
"""

import json
from pathlib import Path

from jaxrlhf.config import load, shipped, to_json

GOLDENS = Path(__file__).parents[1] / "tests" / "golden_configs"


def main() -> None:
    """Write one JSON file for each configuration, and remove those of configurations that are gone."""
    GOLDENS.mkdir(exist_ok=True)
    known = shipped()
    for golden in GOLDENS.glob("*.json"):
        if golden.stem not in known:
            golden.unlink()
    for name in known:
        (GOLDENS / f"{name}.json").write_text(json.dumps(to_json(load(name)), indent=2) + "\n")


if __name__ == "__main__":
    main()
