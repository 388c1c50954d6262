"""Checks of a resumed run: settings that may not change although the checkpoint's arrays would still fit."""

from pathlib import Path
from typing import Any

from jaxrlhf.checkpoint import identity
from jaxrlhf.config import Config, FromScratch, Lora, Pretrained, Refusal, to_json
from jaxrlhf.config.refusal import read_object, reading
from jaxrlhf.tracking.files import SETTINGS, STARTED_FROM
from jaxrlhf.tracking.records import write_json

Described = dict[str, Any]

PUT_BACK = "the file describes the checkpoints of the run; restore the file that the run wrote"
_FREE = ("name", "workdir", "resume", "trackers")
"""Settings that do not affect training."""


def describe_start(workdir: Path, run: Config) -> None:
    """Write the settings of a run, and the identity of the weights that it starts from, to the workdir."""
    start = {SETTINGS: to_json(run)}
    if isinstance(run.model, Pretrained):
        start[STARTED_FROM] = identity(run.model.path)
    for name, content in start.items():
        write_json(workdir / name, content)


def changed_settings(workdir: Path, run: Config) -> list[str]:
    """Return the settings that changed since the run was last started, as `name before -> now`."""
    if not (workdir / SETTINGS).exists():
        return []
    before, now = _flat(read_object(workdir / SETTINGS, PUT_BACK)), _flat(to_json(run))
    changed = [name for name in now if name in before and before[name] != now[name] and name not in _FREE]
    return [f"{name} {before[name]} -> {now[name]}" for name in changed]


def check_same_start(workdir: Path, config: Config) -> None:
    """Refuse to resume from checkpoints with another model, another cold start or other adapters.

    The reference model and the adapters' base weights are rebuilt from the run's original starting point. The adapters'
    scale and the quantization of base weights are stored in the settings, not in the arrays. The pretrained checkpoint
    may have moved to another path.

    Args:
      workdir: Folder of the run; its config.json describes its checkpoints.

    Raises:
      Refusal: `model`, `cold_start` or a role's `lora` has changed; config.json is damaged; or config.json is missing
        and a role has adapters.
    """
    file, trained = workdir / SETTINGS, config.trained
    if not file.exists():
        if adapting := [role for role, training in trained.items() if training.lora is not None]:
            raise Refusal(
                f"{file} is missing, and with it the scale of the adapters of {', '.join(adapting)}; restore the file"
            )
        return
    saved = read_object(file, PUT_BACK)
    with reading(file, PUT_BACK):
        _check_start(workdir, config, saved)


def _check_start(workdir: Path, config: Config, saved: Described) -> None:
    before, now = _model(saved["model"]), _model(to_json(config.model))
    described = workdir / STARTED_FROM
    if "path" in before and isinstance(config.model, Pretrained) and described.exists():
        given = identity(config.model.path, fetch=before["path"] != now["path"])
        known = _known(described)
        if known and given:
            _check_same_weights(workdir, before.pop("path"), known, now.pop("path"), given)
    _check_same(workdir, "model", before, now)
    # Only the steps of a cold start are compared: once it is over, its optimizer is not used again.
    cold = [{"steps": was["steps"]} if was else {} for was in (saved["cold_start"], to_json(config.cold_start))]
    _check_same(workdir, "cold_start", *cold)
    for role, training in config.trained.items():
        settings = saved["actor"] if role == "actor" else saved["algorithm"].get(role)
        before, now = _lora(settings and settings["lora"]), _lora(to_json(training.lora))
        _check_same(workdir, f"{role}.lora", before, now)


def _known(described: Path) -> Described | None:
    """Read the identity of the weights that a run started from; None if they were not on the machine at its start."""
    if described.is_file() and described.read_bytes() == b"null\n":
        return None
    return read_object(described, PUT_BACK)


def _flat(described: Described, prefix: str = "") -> Described:
    """Flatten settings to dotted names; a nested settings object is represented by its class."""
    flat: Described = {}
    for name, value in described.items():
        inner = dict(value) if isinstance(value, dict) else {"class": value}
        flat |= {prefix + name: inner.pop("class", None), **_flat(inner, f"{prefix}{name}.")}
    return flat


def _check_same_weights(workdir: Path, was: str, known: Described, path: str, given: Described) -> None:
    if other := sorted(name for name in known | given if known.get(name) != given.get(name)):
        raise Refusal(
            f"{workdir} started from the checkpoint {was}, but {path} differs in {', '.join(other[:3])}; resume with "
            "the original checkpoint, or choose another workdir"
        )


def _check_same(workdir: Path, name: str, before: Described, now: Described) -> None:
    if changed := [part for part in now | before if now.get(part) != before.get(part)]:
        was, given = (
            ", ".join(f"{part}={settings[part]!r}" for part in changed if part in settings) or "none"
            for settings in (before, now)
        )
        raise Refusal(
            f"{workdir} was trained with {name}: {was}, but the configuration has {given}; resume with the original "
            "settings, or choose another workdir"
        )


def _model(described: Described) -> Described:
    """Return the settings of the model, with defaults for settings that an earlier version did not write.

    The function that builds a user's module is left out, because its name may contain a memory address.
    """
    defaults = {"FromScratch": FromScratch(), "Pretrained": Pretrained(described.get("path", "."))}
    known = defaults.get(described["class"])
    settings = (to_json(known) if known else {}) | described
    return {name: value for name, value in settings.items() if name != "build"}


def _lora(described: Described | None) -> Described:
    """Return the settings of adapters, with defaults for settings that an earlier version did not write."""
    if described is None:
        return {}
    return {name: value for name, value in (to_json(Lora()) | described).items() if name != "class"}
