"""Files of a split of a data set: in a directory as given, or in a snapshot from the hub."""

from pathlib import Path

from jaxrlhf.config import Refusal


def split_files(path: str, name: str) -> list[Path]:
    """One file of split `name`, or its shards in order: in a directory as given, or in a snapshot from the hub."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _from_hub(path)
    patterns = (f"{name}.jsonl", f"{name}.parquet", f"{name}-*.parquet", f"main/{name}-*.parquet")
    for pattern in patterns:
        if found := sorted(directory.glob(pattern)):
            return found
    raise Refusal(f"{directory} holds no {name}.jsonl and no {name}.parquet")


def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, repo_type="dataset", allow_patterns=["main/*", "train*", "test*"]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise Refusal(
            f"data.path={path!r} is neither a directory nor a data set that the hub gave ({reason}); "
            "without a network, give a directory with train.jsonl and test.jsonl"
        ) from error
