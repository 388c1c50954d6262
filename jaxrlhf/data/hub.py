"""Files of a split of a data set: named paths, a local directory, or the hub, downloaded as they are read."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import read_object, reading, reason_of
from jaxrlhf.config.sources import HubFiles, PairFields, RecordFiles
from jaxrlhf.data.records import RECORDS, Row, read_rows

_SIGNS = re.compile(r"(\*+|\?|\[[^\]]+\])|[^*?]")
_READ = {"*": "[^/]*", "?": "[^/]"}
_AUXILIARY = re.compile(r"(^|/)(dataset_dict\.json|dataset_infos?\.json|state\.json|cache-[^/]*\.arrow)$")
"""Metadata and caches of `datasets`, which are no records of a data set."""


def split_files(path: str, name: str) -> list[Path]:
    """Return the file of split `name`, or its shards in order, from a directory or a snapshot of the hub."""
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
    place = _Directory(data.path) if Path(data.path).expanduser().is_dir() else _Repository(data.path, data.revision)
    files = _files_of(place, data.subset, name)
    rows = (row for file in files for row in read_rows(place.file(file)))
    return islice(rows, data.train_problems if part == "train" else None)


def identity(data: HubFiles | RecordFiles, split: str) -> list[tuple[str, int, Any]]:
    """Return name, size and version of each file of a split; files of the hub count as large."""
    name: str | None = getattr(data, _part(data, split))
    if name is None:
        return []
    if isinstance(data, RecordFiles):
        paths = [path for path in record_files(name) if path.is_file()]
        return [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    if not (directory := Path(data.path).expanduser()).is_dir():
        place = _Repository(data.path, data.revision)
        return [(file, 2**62, place.commit) for file in _files_of(place, data.subset, name)]
    stats = [(file, (directory / file).stat()) for file in _files_of(_Directory(data.path), data.subset, name)]
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
        raise Refusal(f"{path}: no file has a name of this pattern (looked from {Path.cwd()})")
    return found


def _part(data: HubFiles | RecordFiles, split: str) -> str:
    """Return the setting that names a split's files; held-out pairs may be a share of the training split."""
    shared = isinstance(data, PairFields) and data.evaluation_fraction > 0
    return "train" if shared else split


class _Directory:
    """Local directory that is laid out like a data set of the hub."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._path = Path(path).expanduser()
        files = (file for file in self._path.rglob("*") if file.is_file())
        self.names = _visible(file.relative_to(self._path).as_posix() for file in files)
        self.called = f"the directory {path}"

    def file(self, name: str) -> Path:
        return self._path / name


class _Repository:
    """Data set of the hub at one commit; without a network, its files that were downloaded before."""

    def __init__(self, path: str, revision: str | None) -> None:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

        self.path = self._path = path
        self.called = f"the hub's data set {path!r}"
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
        self.names = _visible(file.rfilename for file in info.siblings or ())

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
    """Return the names of a split's files, as declared in the data set's card, else chosen by file name."""
    files = [name for name in place.names if RECORDS.search(name) and not _AUXILIARY.search(name)]
    configs = _configs(place) if "README.md" in place.names else []
    if configs:
        patterns = _patterns(_chosen(configs, subset, place), split, place)
        found = [name for name in files if any(_matches(name, pattern) for pattern in patterns)]
    else:
        named = re.compile(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)")
        within = [name for name in files if subset is None or name.startswith(f"{subset}/")]
        # A file's name takes precedence over its folders': `test_data/train.jsonl` is no test file.
        found = [name for name in within if named.search(Path(name).name)]
        found = found or [name for name in within if named.search(name)]
        # Next to .jsonl or .parquet files, a .json file is a description of them, and a .csv file has the same records.
        for kind in (".json", ".csv", ".tsv"):
            found = [name for name in found if kind not in Path(name).suffixes] or found
        folders = {str(Path(name).parent) for name in found}
        if subset is None and len(folders) > 1:
            raise Refusal(
                f"{place.called} has split {split!r} in {', '.join(sorted(folders))}; say which is data.subset"
            )
    if not found:
        others = [name for name in place.names if name not in files]
        there = ", ".join(files[:8]) or f"none at all, but {', '.join(others[:8]) or 'no files'}"
        raise Refusal(
            f"{place.called} has no .jsonl, .json, .csv or .parquet file of split {split!r}"
            f"{'' if subset is None else f' in subset {subset!r}'}; it has {there}{_advice(place)}"
        )
    return found


def _advice(place: _Directory | _Repository) -> str:
    """Return advice on a folder without splits that `save_to_disk` of `datasets` wrote; empty for other places."""
    return f"; PromptFile({place.path!r}) and PairFile read this folder" if "state.json" in place.names else ""


def _visible(names: Iterable[str]) -> list[str]:
    """Return sorted names without hidden files and folders, as the library `datasets` lists a folder."""
    return sorted(name for name in names if not any(part.startswith((".", "__")) for part in name.split("/")))


def _matches(name: str, pattern: str) -> bool:
    """Return True if a card's pattern matches a file: `*` stays within a folder, `**` is any number of folders."""
    *folders, last = pattern.removeprefix("./").split("/")
    above = "".join("(?:[^/]+/)*" if folder == "**" else f"{_one_name(folder)}/" for folder in folders)
    return re.fullmatch(above + ("(?:[^/]+/)*[^/]+" if last == "**" else _one_name(last)), name) is not None


def _one_name(pattern: str) -> str:
    """Return the regular expression of a pattern of one name: `*`, `?`, and character sets such as `[0-9]`."""

    def read(sign: re.Match[str]) -> str:
        if not sign[1]:
            return re.escape(sign[0])
        return _READ.get(sign[1][0]) or sign[1].replace("[!", "[^")

    return _SIGNS.sub(read, pattern)


def _configs(place: _Directory | _Repository) -> Sequence[Mapping[str, Any]]:
    """Return the configurations with files that the card of a data set declares."""
    from huggingface_hub import DatasetCard

    text = place.file("README.md").read_text("utf-8", "replace")
    try:
        card = DatasetCard(text, ignore_metadata_errors=True)
    except Exception as error:  # the YAML reader's exceptions have no common class
        raise Refusal(f"the README.md of {place.called} is no data set's card ({reason_of(error)}); mend it") from error
    configs = [one for one in card.data.to_dict().get("configs") or () if one.get("data_files")]
    if any("config_name" not in one for one in configs):
        raise Refusal(f"the README.md of {place.called} has a configuration without config_name; give it one")
    return configs


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


def _patterns(config: Mapping[str, Any], split: str, place: _Directory | _Repository) -> list[str]:
    """Return the name patterns of a split's files; files declared without a split belong to `train`."""
    declared = config["data_files"]
    entries = declared if isinstance(declared, list) else [declared]
    patterns: list[str] = []
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, Mapping) and {"split", "path"} <= entry.keys()):
            raise Refusal(
                f"the README.md of {place.called} has data_files {entry!r:.80}; expected a path, or a list of entries, "
                "each with split and path"
            )
        of, paths = ("train", entry) if isinstance(entry, str) else (entry["split"], entry["path"])
        patterns += ([paths] if isinstance(paths, str) else paths) if of == split else []
    folder = config.get("data_dir")
    return [f"{folder}/{pattern}" if folder else pattern for pattern in patterns]
