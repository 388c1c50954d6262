"""Settings by dotted name: listing them, finding them, and overriding them in a `Config`."""

import dataclasses
import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast, get_args, get_origin

from jaxrlhf.config.checks.contradictions import checked
from jaxrlhf.config.cli.annotations import check_type, field_types, variants
from jaxrlhf.config.refusal import Refusal, require
from jaxrlhf.config.run import Config

Classes = Mapping[str, type]
"""Classes that a change gives for settings, by dotted name."""

_NO_CLASSES: Classes = MappingProxyType({})

PEERS = {
    "num_generations": "rollout.responses_per_prompt",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "train_batch_size": "rollout.prompts_per_step",
    "ppo_mini_batch_size": "algorithm.responses_per_update",
    "per_device_train_batch_size": "algorithm.responses_per_update",
    "num_iterations": "algorithm.epochs_per_step",
    "ppo_epochs": "algorithm.epochs_per_step",
    "max_steps": "steps",
    "total_training_steps": "steps",
    "num_train_epochs": "steps",
    "total_epochs": "steps",
    "lr": "actor.optimizer.learning_rate",
    "beta": "algorithm.kl",
    "kl_loss_coef": "algorithm.kl",
    "epsilon": "algorithm.policy.clip_low",
    "epsilon_high": "algorithm.policy.clip_high",
    "output_dir": "workdir",
    "default_local_dir": "workdir",
    "report_to": "trackers",
}
"""Names of settings in TRL or verl, with the corresponding setting."""


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy with settings changed by dotted name; contradictions are checked after all changes.

        override(config, {"steps": 3, "actor.optimizer.learning_rate": 1e-5, "model": Pretrained("/x")})

    A class stands for its settings with their defaults. A setting that is None and whose fields are changed starts from
    the defaults of its class, if only one class has these fields:

        override(config, {"algorithm.kl": KLInLoss, "algorithm.kl.coefficient": 1e-3, "actor.lora.rank": 8})

    Raises:
      Refusal: A name is not a setting, a value has another type, or settings contradict each other after the change.
    """
    classes = {name: value for name, value in changes.items() if isinstance(value, type)}
    for name in changes:
        find(config, name, classes)
    return checked(cast(Config, _rebuilt(config, type(config), changes, "")))


def setting_names(settings: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings that hold a plain value rather than further settings."""
    found = []
    for name, (value, annotation) in _parts(settings).items():
        if dataclasses.is_dataclass(value) or (isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value))):
            found += setting_names(value, f"{prefix}{name}.")
        elif not variants(annotation):
            found.append(prefix + name)
    return found


def find(config: Config, name: str, classes: Classes = _NO_CLASSES) -> tuple[Any, Any]:
    """Return the value and the annotation of a setting; the value is a class if its settings are not built yet.

    Args:
      name: Dotted name, with an index for members of tuples: `rewards.parts.0.weight`.
      classes: Classes that the same change names.

    Raises:
      Refusal: The setting does not exist; the message names existing settings.
    """
    value: Any = config
    annotation, reached = type(config), ""
    for part in name.split("."):
        value = _settings_or_class(value, annotation, part)
        if part not in _parts(value, annotation):
            raise Refusal(f"no setting {name}: " + _advice(config, name, reached, value, annotation))
        value, annotation = _parts(value, annotation)[part]
        reached = f"{reached}.{part}".removeprefix(".")
        if reached in classes and type(value) is not classes[reached]:
            value = classes[reached]
    return value, annotation


def _settings_or_class(value: Any, annotation: Any, part: str) -> Any:
    """Return the existing settings or, if they are None, the only class that has a field `part`."""
    if value is not None:
        return value
    kinds = [kind for kind in variants(annotation) if part in field_types(kind)]
    return kinds[0] if len(kinds) == 1 else None


def _parts(settings: Any, annotation: Any = None) -> dict[str, tuple[Any, Any]]:
    """Return the value and annotation of each field or index that can follow in a dotted name; of a class, defaults."""
    if isinstance(settings, tuple):
        item = (*get_args(annotation), Any)[0]
        return {str(index): (value, item) for index, value in enumerate(settings)}
    if not dataclasses.is_dataclass(settings):
        return {}
    if not isinstance(settings, type):
        return {name: (getattr(settings, name), kind) for name, kind in field_types(type(settings)).items()}
    kinds = field_types(settings)
    return {field.name: (_default(field), kinds[field.name]) for field in dataclasses.fields(settings) if field.init}


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; None if there is no default."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _rebuilt(settings: Any, annotation: Any, changes: Mapping[str, Any], reached: str) -> Any:
    """Rebuild settings with changes, innermost first, so that each dataclass is checked once, with all its changes."""
    below: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, new in changes.items():
        part, _, rest = name.partition(".")
        below[part][rest] = new
    parts, built = _parts(settings, annotation), {}
    for part, (value, kind) in parts.items():
        inner, here = below.get(part, {}), f"{reached}.{part}".removeprefix(".")
        if "" in inner:
            value = _given(value, kind, inner.pop(""), here)
        if inner:
            first = next(iter(inner))
            value = _settings_or_class(value, kind, first.partition(".")[0])
            require(value is not None, f"{here} is None, but {here}.{first} is set; remove one of them")
        made = isinstance(value, tuple) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
        if made or _is_class_for(value, kind):
            built[part] = _rebuilt(value, kind, inner, here)
        elif value is not parts[part][0]:
            built[part] = value
    if isinstance(settings, tuple):
        return tuple(built.get(part, value) for part, (value, _) in parts.items())
    if not isinstance(settings, type):
        return dataclasses.replace(settings, **built)
    missing = [field.name for field in dataclasses.fields(settings) if _is_required(field) and field.name not in built]
    require(not missing, f"{reached}={settings.__name__} requires {', '.join(f'{reached}.{name}' for name in missing)}")
    return settings(**built)


def _given(value: Any, annotation: Any, new: Any, name: str) -> Any:
    """Return the new value of a setting. A class keeps existing settings of that class, or stands for its defaults."""
    if _is_class_for(new, annotation):
        return value if type(value) is new else new
    check_type(name, new, annotation)
    return new


def _is_class_for(value: Any, annotation: Any) -> bool:
    """Return True for a class whose settings the annotation allows."""
    return isinstance(value, type) and value in variants(annotation) and get_origin(annotation) is not tuple


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _advice(config: Config, name: str, reached: str, value: Any, annotation: Any) -> str:
    """Explain why a setting's name does not resolve beyond `reached`, and suggest a name that does."""
    part, *rest = name.removeprefix(reached).removeprefix(".").split(".")
    kinds = [] if value is config else variants(annotation)
    owners = [kind.__name__ for kind in kinds if part in field_types(kind)]
    if isinstance(value, tuple) and part.isdigit():
        counted = f"{len(value)}, from index 0" if value else "none"
        return f"{reached} has {counted}; add entries in the configuration file"
    meant = [] if owners else difflib.get_close_matches(part, {own for kind in kinds for own in field_types(kind)}, n=1)
    if value is None and meant:
        return f"did you mean {'.'.join([reached, *meant, *rest])}?"
    if value is None and kinds:
        which = owners or [kind.__name__ for kind in kinds]
        return f"{reached} is None; first choose its class: {_either(f'--{reached} {kind}' for kind in which)}"
    if owners:
        have = value.__name__ if isinstance(value, type) else type(value).__name__
        return f"{reached} is {have}, but {part} is a setting of {_either(owners)}; add --{reached} {owners[0]}"
    if (removed := getattr(value, "removed", {}).get(part)) is not None:
        return f"it was removed; {removed}"
    here = difflib.get_close_matches(part, _parts(value), n=1)
    elsewhere = defaultdict(list)
    for setting in setting_names(config):
        elsewhere[setting.rpartition(".")[2]].append(setting)
    last = name.rpartition(".")[2]
    namesakes = difflib.get_close_matches(last, elsewhere, n=1)
    if here and (rest or part not in elsewhere):  # the exact name of a setting elsewhere is not a misspelling
        return f"did you mean {'.'.join([reached, *here, *rest]).removeprefix('.')}?"
    if last in PEERS and last not in elsewhere:
        return f"{last} of TRL or verl corresponds to {PEERS[last]}, approximately; see docs/coming_from.md"
    if namesakes:
        return f"did you mean {_either(elsewhere[namesakes[0]])}?"
    return f"{reached or 'the configuration'} has {', '.join(_parts(value)) or 'no further settings'}"


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)
