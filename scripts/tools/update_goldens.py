"""Update of the golden files of all shipped configurations, after an intended change.

    python -m scripts.tools.update_goldens

`git diff tests/golden/configs` then shows the effect of the change on each configuration.
"""

import json

from jaxrlhf.config import load, shipped, to_json
from scripts.pages import ROOT

GOLDENS = ROOT / "tests" / "golden" / "configs"


def main() -> None:
    """Write one JSON file for each configuration, and remove files of deleted configurations."""
    GOLDENS.mkdir(exist_ok=True)
    known = shipped()
    for golden in GOLDENS.glob("*.json"):
        if golden.stem not in known:
            golden.unlink()
    for name in known:
        (GOLDENS / f"{name}.json").write_text(json.dumps(to_json(load(name)), indent=2) + "\n")


if __name__ == "__main__":
    main()
