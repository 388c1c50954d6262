"""Files of a split of a data set: given, in a directory, or of the hub, downloaded as they are read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.config.sources import HubFiles, PairFields, RecordFiles
from jaxrlhf.data.records import Row, read_rows

_SUFFIX = re.compile(r"\.(jsonl|jsonl\.gz|parquet)$")


def split_files(path: str, name: str) -> list[Path]:
    """One file of split `name`, or its shards in order: in a directory as given, or in a snapshot from the hub."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _snapshot(path)
    patterns = (f"{name}.jsonl", f"{name}.parquet", f"{name}-*.parquet", f"main/{name}-*.parquet")
    for pattern in patterns:
        if found := sorted(directory.glob(pattern)):
            return found
    raise Refusal(f"{directory} holds no {name}.jsonl and no {name}.parquet")


def _snapshot(path: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, repo_type="dataset", allow_patterns=["main/*", "train*", "test*"]))
    except (OSError, ValueError) as error:
        raise Refusal(
            f"data.path={path!r} is neither a directory nor a data set that the hub gave ({reason_of(error)}); "
            "without a network, give a directory with train.jsonl and test.jsonl"
        ) from error


def split_rows(data: HubFiles | RecordFiles, split: str) -> Iterator[Row]:
    """Records of a split; a file of the hub is downloaded when the first of its records is asked for.

    Raises:
      Refusal: No such file, data set, revision, subset or split.
    """
    part = _part(data, split)
    name: str | None = getattr(data, part)
    if name is None:
        return iter(())
    if isinstance(data, RecordFiles):
        return read_rows(Path(name).expanduser())
    place = _Directory(data.path) if Path(data.path).expanduser().is_dir() else _Repository(data.path, data.revision)
    files = _files_of(place, data.subset, name)
    rows = (row for file in files for row in read_rows(place.file(file)))
    return islice(rows, data.train_problems if part == "train" else None)


def identity(data: HubFiles | RecordFiles, split: str) -> list[tuple[str, int, Any]]:
    """Name, size and version of each file of a split; files of the hub count as large."""
    name: str | None = getattr(data, _part(data, split))
    if name is None:
        return []
    if isinstance(data, RecordFiles):
        path = Path(name).expanduser()
        return [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns)] if path.is_file() else []
    if not (directory := Path(data.path).expanduser()).is_dir():
        place = _Repository(data.path, data.revision)
        return [(file, 2**62, place.commit) for file in _files_of(place, data.subset, name)]
    stats = [(file, (directory / file).stat()) for file in _files_of(_Directory(data.path), data.subset, name)]
    return [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def _part(data: HubFiles | RecordFiles, split: str) -> str:
    """Setting that names a split's files; held-out pairs may be a share of the training split."""
    shared = isinstance(data, PairFields) and data.evaluation_fraction > 0
    return "train" if shared else split


class _Directory:
    """Files of a local directory that is laid out like a data set of the hub."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self.names = sorted(str(file.relative_to(self._path)) for file in self._path.rglob("*") if file.is_file())
        self.called = f"the directory {path}"

    def file(self, name: str) -> Path:
        return self._path / name


class _Repository:
    """Files of a data set of the hub, at one commit; without the network, those of it that were downloaded before."""

    def __init__(self, path: str, revision: str | None) -> None:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

        self._path, self.called = path, f"the hub's data set {path!r}"
        self._revision = revision
        self._kept: Path | None = None
        self.commit: str | None = None
        try:
            info = huggingface_hub.HfApi().dataset_info(path, revision=revision)
        except RevisionNotFoundError as error:
            raise Refusal(f"{self.called} has no branch, tag or commit {revision!r}; check the spelling") from error
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise Refusal(
                f"no directory {path!r} and no data set of that name that the hub shows ({reason_of(error)}); "
                "check the spelling, or log in with `hf auth login` or HF_TOKEN"
            ) from error
        except (HTTPError, OSError) as error:
            self._kept = self._downloaded(error)
            self.names, self.commit = _Directory(str(self._kept)).names, self._kept.name
            return
        self.commit = info.sha
        self.names = sorted(file.rfilename for file in info.siblings or ())

    def _downloaded(self, error: Exception) -> Path:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        how: dict[str, Any] = {"repo_type": "dataset", "revision": self._revision, "local_files_only": True}
        try:
            return Path(str(huggingface_hub.snapshot_download(self._path, **how)))
        except LocalEntryNotFoundError:
            raise Refusal(
                f"{self.called} cannot be reached ({reason_of(error)}) and was not downloaded before; check the network"
            ) from error

    def file(self, name: str) -> Path:
        import huggingface_hub
        from huggingface_hub.errors import HTTPError

        if self._kept is not None:
            return self._kept / name
        try:
            found = huggingface_hub.hf_hub_download(self._path, name, repo_type="dataset", revision=self._revision)
        except (HTTPError, OSError) as error:
            raise Refusal(f"{name} of {self.called} did not come ({reason_of(error)}); start again") from error
        return Path(found)


def _files_of(place: _Directory | _Repository, subset: str | None, split: str) -> list[str]:
    """Names of a split's files, as the data set's card says or, without one, by their own."""
    files = [name for name in place.names if _SUFFIX.search(name)]
    configs = _configs(place) if "README.md" in place.names else []
    if configs:
        patterns = _patterns(_chosen(configs, subset, place), split)
        found = [name for name in files if any(fnmatch(name, pattern) for pattern in patterns)]
    else:
        named = re.compile(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)")
        within = [name for name in files if subset is None or name.startswith(f"{subset}/")]
        # A file's own name says more than its folders': `test_data/train.jsonl` is no test.
        found = [name for name in within if named.search(Path(name).name)]
        found = found or [name for name in within if named.search(name)]
        folders = {str(Path(name).parent) for name in found}
        if subset is None and len(folders) > 1:
            raise Refusal(
                f"{place.called} has split {split!r} in {', '.join(sorted(folders))}; say which is data.subset"
            )
    if not found:
        raise Refusal(
            f"{place.called} has no .jsonl or .parquet file of split {split!r}"
            f"{'' if subset is None else f' in subset {subset!r}'}; it has {', '.join(files[:8]) or 'none at all'}"
        )
    return found


def _configs(place: _Directory | _Repository) -> Sequence[Mapping[str, Any]]:
    """Configurations that the card of a data set declares, with files."""
    from huggingface_hub import DatasetCard

    text = place.file("README.md").read_text("utf-8", "replace")
    try:
        card = DatasetCard(text, ignore_metadata_errors=True)
    except Exception as error:  # what the reader of YAML raises has no class of its own
        raise Refusal(f"the README.md of {place.called} is no data set's card ({reason_of(error)}); mend it") from error
    return [one for one in card.data.to_dict().get("configs") or () if one.get("data_files")]


def _chosen(
    configs: Sequence[Mapping[str, Any]], subset: str | None, place: _Directory | _Repository
) -> Mapping[str, Any]:
    names = {str(one["config_name"]): one for one in configs}
    if subset is None:
        marked = [one for one in configs if one.get("default") or one["config_name"] == "default"]
        if marked or len(configs) == 1:
            return (*marked, *configs)[0]
    elif subset in names:
        return names[subset]
    raise Refusal(f"{place.called} has the subsets {', '.join(names)}; say which is data.subset, got {subset!r}")


def _patterns(config: Mapping[str, Any], split: str) -> list[str]:
    """Patterns of the names of a split's files; files without a split are those of `train`."""
    declared = config["data_files"]
    entries = declared if isinstance(declared, list) else [declared]
    patterns: list[str] = []
    for entry in entries:
        of, paths = ("train", entry) if isinstance(entry, str) else (entry["split"], entry["path"])
        patterns += ([paths] if isinstance(paths, str) else paths) if of == split else []
    folder = config.get("data_dir")
    return [f"{folder}/{pattern}" if folder else pattern for pattern in patterns]
