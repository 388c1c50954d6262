"""Files of a split of a data set: named paths, a local directory, or the hub, downloaded as they are read."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any

from fsspec.utils import glob_translate

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import read_object, reading, reason_of
from jaxrlhf.config.sources import HubFiles, PairFields, RecordFiles
from jaxrlhf.data.records import RECORDS, Row, read_rows

_AUXILIARY = re.compile(r"(^|/)(dataset_dict\.json|dataset_infos?\.json|state\.json|cache-[^/]*\.arrow)$")
"""Pattern of the names of metadata and cache files of `datasets`."""


def split_rows(data: HubFiles | RecordFiles, split: str) -> Iterator[Row]:
    """Return an iterator over the records of a split; a hub file is downloaded when its first record is requested.

    Raises:
      Refusal: There is no such file, data set, revision, subset or split.
    """
    part = _part(data, split)
    name: str | None = getattr(data, part)
    if name is None:
        return iter(())
    if isinstance(data, RecordFiles):
        return (row for file in record_files(name) for row in read_rows(file))
    place = _place(data)
    rows = (row for file in _files_of(place, data.subset, name) for row in read_rows(place.file(file)))
    return islice(rows, data.train_problems if part == "train" else None)


def identity(data: HubFiles | RecordFiles, split: str) -> list[tuple[str, int, Any]]:
    """Return name, size and version of each file of a split; files of the hub count as large."""
    name: str | None = getattr(data, _part(data, split))
    if name is None:
        return []
    if isinstance(data, RecordFiles):
        paths = [path for path in record_files(name) if path.is_file()]
        return [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    place = _place(data)
    files = _files_of(place, data.subset, name)
    if isinstance(place, _Repository):
        return [(file, 2**62, place.commit) for file in files]
    stats = [(file, place.file(file).stat()) for file in files]
    return [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def record_files(name: str) -> list[Path]:
    """Return the files that a path or a pattern of `*`, `?` and `[` names, sorted by name.

    A folder that `save_to_disk` of `datasets` wrote names its files in `state.json`.

    Raises:
      Refusal: A pattern matches no file, or `state.json` is damaged.
    """
    path = Path(name).expanduser()
    if (state := path / "state.json").is_file():
        remedy = "save the data set again"
        fields = read_object(state, remedy)
        with reading(state, remedy):
            return [path / Path(file["filename"]).name for file in fields["_data_files"]]
    if path.exists() or not has_magic(str(path)):
        return [path]
    found = [Path(one) for one in sorted(glob(str(path), recursive=True)) if Path(one).is_file()]
    if not found:
        raise Refusal(f"{path}: no file name matches this pattern (relative to {Path.cwd()})")
    return found


def _part(data: HubFiles | RecordFiles, split: str) -> str:
    """Return the setting that names a split's files; held-out pairs may be a share of the training split."""
    shared = isinstance(data, PairFields) and data.evaluation_fraction > 0
    return "train" if shared else split


def _place(data: HubFiles) -> "_Directory | _Repository":
    return _Directory(data.path) if Path(data.path).expanduser().is_dir() else _Repository(data.path, data.revision)


class _Directory:
    """Local directory with the layout of a hub data set."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._path = Path(path).expanduser()
        files = (file for file in self._path.rglob("*") if file.is_file())
        self.names = _visible(file.relative_to(self._path).as_posix() for file in files)
        self.title = f"the directory {path}"

    def file(self, name: str) -> Path:
        return self._path / name


class _Repository:
    """Data set of the hub at one commit; without a network, the files that were downloaded before."""

    def __init__(self, path: str, revision: str | None) -> None:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

        self.path = self._path = path
        self.title = f"the hub's data set {path!r}"
        self._revision = revision
        self._snapshot: Path | None = None
        self.commit: str | None = None
        try:
            info = huggingface_hub.HfApi().dataset_info(path, revision=revision)
        except RevisionNotFoundError as error:
            raise Refusal(f"{self.title} has no branch, tag or commit {revision!r}; check the spelling") from error
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise Refusal(
                f"there is no directory {path!r} and no public data set of that name ({reason_of(error)}); "
                "check the spelling, or log in with `hf auth login` or HF_TOKEN"
            ) from error
        except (HTTPError, OSError) as error:
            self._snapshot = self._downloaded(error)
            self.names, self.commit = _Directory(str(self._snapshot)).names, self._snapshot.name
            return
        self.commit = info.sha
        self.names = _visible(file.rfilename for file in info.siblings or ())

    def _downloaded(self, error: Exception) -> Path:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        how: dict[str, Any] = {"repo_type": "dataset", "revision": self._revision, "local_files_only": True}
        try:
            return Path(str(huggingface_hub.snapshot_download(self._path, **how)))
        except LocalEntryNotFoundError:
            raise Refusal(
                f"{self.title} cannot be reached ({reason_of(error)}) and was not downloaded before; check the "
                "network, or give a directory with its files"
            ) from error

    def file(self, name: str) -> Path:
        import huggingface_hub
        from huggingface_hub.errors import HTTPError

        if self._snapshot is not None:
            return self._snapshot / name
        try:
            found = huggingface_hub.hf_hub_download(self._path, name, repo_type="dataset", revision=self._revision)
        except (HTTPError, OSError) as error:
            raise Refusal(f"{name} of {self.title} was not downloaded ({reason_of(error)}); start again") from error
        return Path(found)


def _files_of(place: _Directory | _Repository, subset: str | None, split: str) -> list[str]:
    """Return the names of a split's files, as declared in the data set's card, else chosen by file name."""
    files = [name for name in place.names if RECORDS.search(name) and not _AUXILIARY.search(name)]
    configs = _configs(place) if "README.md" in place.names else []
    if configs:
        patterns = _patterns(_chosen(configs, subset, place), split, place)
        found = [name for name in files if any(pattern.match(name) for pattern in patterns)]
    else:
        word = re.compile(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)")
        within = [name for name in files if subset is None or name.startswith(f"{subset}/")]
        # A file's name takes precedence over folder names: `test_data/train.jsonl` is no test file.
        found = [name for name in within if word.search(Path(name).name)]
        found = found or [name for name in within if word.search(name)]
        # Next to .jsonl or .parquet files, a .json file describes these files, and a .csv file has the same records.
        for kind in (".json", ".csv", ".tsv"):
            found = [name for name in found if kind not in Path(name).suffixes] or found
        folders = {str(Path(name).parent) for name in found}
        if subset is None and len(folders) > 1:
            raise Refusal(
                f"{place.title} has split {split!r} in {', '.join(sorted(folders))}; set data.subset to one of them"
            )
    if not found:
        others = [name for name in place.names if name not in files]
        present = ", ".join(files[:8]) or f"none at all, but {', '.join(others[:8]) or 'no files'}"
        raise Refusal(
            f"{place.title} has no .jsonl, .json, .csv or .parquet file of split {split!r}"
            f"{'' if subset is None else f' in subset {subset!r}'}; it has {present}{_advice(place)}"
        )
    return found


def _advice(place: _Directory | _Repository) -> str:
    """Return advice on a folder without splits that `save_to_disk` of `datasets` wrote; empty for other places."""
    return f"; PromptFile({place.path!r}) and PairFile read this folder" if "state.json" in place.names else ""


def _visible(names: Iterable[str]) -> list[str]:
    """Return sorted names without hidden files and folders, as the library `datasets` lists a folder."""
    return sorted(name for name in names if not any(part.startswith((".", "__")) for part in name.split("/")))


def _configs(place: _Directory | _Repository) -> Sequence[Mapping[str, Any]]:
    """Return the configurations with files that the card of a data set declares."""
    from huggingface_hub import DatasetCard

    text = place.file("README.md").read_text("utf-8", "replace")
    try:
        card = DatasetCard(text, ignore_metadata_errors=True)
    except Exception as error:  # the YAML reader's exceptions have no common class
        raise Refusal(f"the README.md of {place.title} is no data set's card ({reason_of(error)}); fix it") from error
    configs = [one for one in card.data.to_dict().get("configs") or () if one.get("data_files")]
    if any("config_name" not in one for one in configs):
        raise Refusal(f"the README.md of {place.title} has a configuration without config_name; add the name")
    return configs


def _chosen(
    configs: Sequence[Mapping[str, Any]], subset: str | None, place: _Directory | _Repository
) -> Mapping[str, Any]:
    names = {str(one["config_name"]): one for one in configs}
    if subset is None:
        default = [one for one in configs if one.get("default") or one["config_name"] == "default"]
        if default or len(configs) == 1:
            return (*default, *configs)[0]
    elif subset in names:
        return names[subset]
    raise Refusal(f"{place.title} has the subsets {', '.join(names)}; set data.subset to one of them, got {subset!r}")


def _patterns(config: Mapping[str, Any], split: str, place: _Directory | _Repository) -> list[re.Pattern[str]]:
    """Return the name patterns of a split's files; files declared without a split belong to `train`."""
    declared = config["data_files"]
    entries = declared if isinstance(declared, list) else [declared]
    patterns: list[str] = []
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, Mapping) and {"split", "path"} <= entry.keys()):
            raise Refusal(
                f"the README.md of {place.title} has data_files {entry!r:.80}; expected a path, or a list of entries, "
                "each with split and path"
            )
        name, paths = ("train", entry) if isinstance(entry, str) else (entry["split"], entry["path"])
        patterns += ([paths] if isinstance(paths, str) else paths) if name == split else []
    folder = config.get("data_dir")
    patterns = [f"{folder}/{pattern}" if folder else pattern for pattern in patterns]
    try:
        return [re.compile(glob_translate(pattern.removeprefix("./"))) for pattern in patterns]
    except ValueError as error:
        raise Refusal(f"the README.md of {place.title} has an invalid pattern ({reason_of(error)}); fix it") from error
