"""What a run may not change when it is resumed, though its checkpoints would fit."""

import json
from pathlib import Path
from typing import Any

from jaxrlhf.config import Config, Lora, to_json


def check_same_adapters(workdir: Path, config: Config) -> None:
    """Refuse to go on with adapters that would mean something else.

    A scale, or what the weights beside them are rounded to, is in the settings and not in the arrays.

    Args:
      workdir: Of the run, whose checkpoints go with its config.json.

    Raises:
      ValueError: A role's `lora` is not what it was, or no config.json says so.
    """
    file, trained = workdir / "config.json", config.algorithm.training(config)
    if not file.exists():
        if adapting := [role for role, training in trained.items() if training.lora is not None]:
            raise ValueError(f"{file} is gone, and with it the scale of {', '.join(adapting)}'s adapters; put it back")
        return
    saved = json.loads(file.read_text())
    for role, training in trained.items():
        described = saved["actor"] if role == "actor" else saved["algorithm"].get(role)
        before, now = _settings(described and described["lora"]), _settings(to_json(training.lora))
        if changed := [name for name in now | before if now.get(name) != before.get(name)]:
            was, given = (
                ", ".join(f"{name}={lora[name]!r}" for name in changed if name in lora) or "none"
                for lora in (before, now)
            )
            raise ValueError(
                f"{workdir} trained with {role}.lora of {was}, and the configuration has {given}; "
                f"resume with what it was, or choose another workdir"
            )


def _settings(lora: dict[str, Any] | None) -> dict[str, Any]:
    """What an earlier version did not write is at its default."""
    return {} if lora is None else {name: value for name, value in (to_json(Lora()) | lora).items() if name != "class"}
