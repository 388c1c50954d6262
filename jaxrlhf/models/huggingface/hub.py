"""Directory of a checkpoint: a local directory, the hub's cache of a repository, or the description of a GGUF file."""

import functools
import re
from pathlib import Path

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.models.huggingface.gguf_folder import SUFFIX as GGUF
from jaxrlhf.models.huggingface.gguf_folder import as_directory as gguf_directory

_HUB_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")
HUB_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
_WEIGHT_FILES = ("model*.safetensors",)  # some repositories hold a second copy of the weights under other names
_TIMEOUT_S = 5.0


def resolve(path: str | Path, *, weights: bool = False) -> Path:
    """Return the directory of a checkpoint: local, the hub's cache of a downloaded hub id, or describing a GGUF file.

    `a/b` is a local path if there is a directory `a`, whatever the hub has. A hub id may end in a branch, tag or
    commit: `a/b@v1.0`.

    Args:
      weights: Download the tensors of a hub id too.

    Raises:
      Refusal: There is no such directory and no reachable hub repository of that name, or the path is a run's folder.
    """
    directory, name = Path(path).expanduser(), str(path)
    if directory.is_dir():
        if (run := _run_of(directory)) is not None:
            raise Refusal(
                f"{name} belongs to a run and is not a checkpoint of a model; export a step with `python -m "
                f"jaxrlhf.export {run} DIRECTORY` (--step sets the step), and use DIRECTORY"
            )
        _check_no_gguf_alone(directory)
        check_files(directory)
        return directory
    if directory.suffix.lower() == GGUF and directory.is_file():
        return gguf_directory(directory)
    if directory.is_file():
        raise Refusal(f"{name} is a file; use the directory with config.json and *.safetensors, or a {GGUF} file")
    if directory.suffix.lower() == GGUF:
        raise Refusal(f"there is no file {name}; check the path of the {GGUF} file")
    found = _HUB_ID.fullmatch(name)
    if found is None or ("/" in name and directory.parent.is_dir()):
        raise Refusal(f"no directory {name!r}; use a local checkpoint directory, or a hub id such as Qwen/Qwen3-0.6B")
    return _download(found["name"], found["revision"], weights=weights)


def _check_no_gguf_alone(directory: Path) -> None:
    """Refuse a directory with GGUF files instead of a checkpoint, because the wanted file is unknown."""
    files = sorted(directory.glob(f"*{GGUF}"))
    if files and not (directory / "config.json").is_file():
        raise Refusal(
            f"{directory} has {len(files)} {GGUF} file{'s' * (len(files) > 1)} and no config.json; use the path of a "
            f"file, such as {files[0]}"
        )


def check_files(directory: Path) -> None:
    """Refuse a folder, a pipe or a broken link under the name of a file; libraries fail on it, or wait for a writer."""
    odd = (file for pattern in HUB_FILES for file in sorted(directory.glob(pattern)) if not file.is_file())
    if (file := next(odd, None)) is not None:
        raise Refusal(f"{file} is no regular file; restore the file, or move it away")


def check_no_adapters_alone(directory: Path) -> None:
    """Raise `Refusal` for a `peft` directory, which has adapters without the model that they belong to."""
    file = directory / "adapter_config.json"
    if not file.is_file() or (directory / "config.json").is_file():
        return
    base = re.search(r'"base_model_name_or_path"\s*:\s*("[^"]*")', file.read_text(errors="replace"))
    model = base[1] if base else "the base model of the adapters"
    raise Refusal(
        f"{directory} has adapters of peft and no config.json; set model=Pretrained({model}) and "
        f"actor.lora=Lora(start={str(directory)!r})"
    )


def _run_of(directory: Path) -> Path | None:
    """Return the workdir of a run, from the workdir itself or one of its saved steps; None for other directories."""
    if (directory / "lock").is_file() and (directory / "checkpoints").is_dir():
        return directory
    return directory.parents[1] if directory.match("checkpoints/step_*") else None


def without_revision(path: str) -> tuple[str, str | None]:
    """Split a hub id into its name and its branch, tag or commit (or None); a directory is unchanged, with None."""
    found = _HUB_ID.fullmatch(path)
    if found is None or Path(path).expanduser().is_dir():
        return path, None
    return found["name"], found["revision"]


@functools.cache
def _download(hub_id: str, revision: str | None, *, weights: bool) -> Path:
    """Return the hub's cache of a repository, updated if the hub answers within the timeout."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError

    files = [*HUB_FILES, *(_WEIGHT_FILES if weights else ())]
    snapshot = functools.partial(huggingface_hub.snapshot_download, hub_id, revision=revision, allow_patterns=files)
    try:
        huggingface_hub.HfApi().model_info(hub_id, revision=revision, timeout=_TIMEOUT_S)
    except (HTTPError, OSError, HFValidationError) as error:
        try:
            return Path(snapshot(local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            raise _not_found(hub_id, revision, error) from error
    try:
        return Path(snapshot())
    except (HTTPError, OSError) as error:
        raise _broken_off(hub_id, error) from error


def _not_found(hub_id: str, revision: str | None, error: Exception) -> Refusal:
    from huggingface_hub.errors import RevisionNotFoundError

    if isinstance(error, RevisionNotFoundError):
        return Refusal(f"hub repository {hub_id!r} has no branch, tag or commit {revision!r}; check the spelling")
    return Refusal(
        f"no local directory {hub_id!r} and no reachable hub repository of that name; "
        f"check the spelling, the network or the login ({reason_of(error)})"
    )


def _broken_off(hub_id: str, error: Exception) -> Refusal:
    """Return the refusal of a repository that exists, but whose files cannot be downloaded."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError

    if isinstance(error, GatedRepoError):
        return Refusal(
            f"hub repository {hub_id!r} is gated: request access at {constants.ENDPOINT}/{hub_id}, then log in with "
            "`hf auth login` or HF_TOKEN"
        )
    return Refusal(
        f"the download of {hub_id!r} from the hub failed ({reason_of(error)}); start again: complete files are not "
        "downloaded again"
    )
