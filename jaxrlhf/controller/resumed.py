"""What a run may not change when it is resumed, though its checkpoints would fit."""

import json
from pathlib import Path
from typing import Any

from jaxrlhf.config import Config, FromScratch, Lora, to_json

Settings = dict[str, Any]


def check_same_start(workdir: Path, config: Config) -> None:
    """Refuse to go on from checkpoints with another model, another cold start or other adapters.

    The reference, and the weights that adapters lie beside, are made again from what the run started from. A scale,
    or what those weights are rounded to, is in the settings and not in the arrays.

    Args:
      workdir: Of the run, whose checkpoints go with its config.json.

    Raises:
      ValueError: `model`, `cold_start` or a role's `lora` is not what it was, or config.json is damaged, or gone though
        it says what adapters are.
    """
    file, trained = workdir / "config.json", config.algorithm.training(config)
    if not file.exists():
        if adapting := [role for role, training in trained.items() if training.lora is not None]:
            raise ValueError(f"{file} is gone, and with it the scale of {', '.join(adapting)}'s adapters; put it back")
        return
    try:
        saved = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}), and says what its checkpoints are; mend it") from error
    _check_same(workdir, "model", _model(saved["model"]), _model(to_json(config.model)))
    _check_same(workdir, "cold_start", _cold_start(saved["cold_start"]), _cold_start(to_json(config.cold_start)))
    for role, training in trained.items():
        described = saved["actor"] if role == "actor" else saved["algorithm"].get(role)
        before, now = _lora(described and described["lora"]), _lora(to_json(training.lora))
        _check_same(workdir, f"{role}.lora", before, now)


def _check_same(workdir: Path, name: str, before: Settings, now: Settings) -> None:
    if changed := [part for part in now | before if now.get(part) != before.get(part)]:
        was, given = (
            ", ".join(f"{part}={settings[part]!r}" for part in changed if part in settings) or "none"
            for settings in (before, now)
        )
        raise ValueError(
            f"{workdir} trained with {name} of {was}, and the configuration has {given}; "
            f"resume with what it was, or choose another workdir"
        )


def _model(described: Settings) -> Settings:
    """Without the function that builds a module of one's own, whose name may hold an address."""
    default = to_json(FromScratch()) if described["class"] == "FromScratch" else {}
    return {name: value for name, value in (default | described).items() if name != "build"}


def _cold_start(described: Settings | None) -> Settings:
    """What says which weights came out of it; once it is over, its optimizer is not used again."""
    return {} if described is None else {"steps": described["steps"]}


def _lora(described: Settings | None) -> Settings:
    """What an earlier version did not write is at its default."""
    if described is None:
        return {}
    return {name: value for name, value in (to_json(Lora()) | described).items() if name != "class"}
