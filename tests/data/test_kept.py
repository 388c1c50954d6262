"""Cache of large files: tokenized once, memory-mapped, and tokenized again if files or settings change."""

import gzip
import os
import pickle
import threading
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow
import pyarrow.parquet
import pytest

from jaxrlhf.config import Mixture, PairFile, PromptFile, Refusal, Source, StepFile
from jaxrlhf.data.records import read_rows
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.table import cache
from jaxrlhf.data.table.problem_table import ProblemTable
from jaxrlhf.data.tokenizer import embedded_tokenizer
from tests.data.test_mixtures import write

RECORDS = [
    {"prompt": f"{n} and {n}?", "answer": 2 * n, "solution": f"#### {2 * n}", "more": [n, None]} for n in range(9)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRLHF_DATA_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(cache, "LEAST_BYTES", 1)
    return tmp_path


def load(data, **settings):
    return load_problems(data, embedded_tokenizer(), split="train", **{"max_prompt_tokens": 99, **settings})


def folders(folder):
    return sorted(path.name for path in (folder / "kept").iterdir())


def test_a_split_is_tokenized_once_and_read_back_unchanged(folder, monkeypatch):
    path = write(folder / "a.jsonl", RECORDS)
    data = PromptFile(path, solution_key="solution")
    monkeypatch.setenv("JAXRLHF_DATA_CACHE", "false")
    plain = load(data)
    monkeypatch.setenv("JAXRLHF_DATA_CACHE", str(folder / "kept"))
    first = load(data)
    monkeypatch.setattr("jaxrlhf.data.sources._tokenized", None)  # nothing is tokenised again
    again = load(data)
    assert plain.kept is None and first.kept == again.kept and len(folders(folder)) == 1
    for loaded in (first, again):
        assert [*loaded.problems] == [*plain.problems]
        assert loaded.problems.fingerprint == plain.problems.fingerprint
        assert loaded.problems.prompt_tokens.lengths.tolist() == plain.problems.prompt_tokens.lengths.tolist()
        assert (loaded.total, loaded.dropped_too_long) == (9, 0)
    assert again.problems[-1].record == RECORDS[-1]


def test_other_settings_or_files_make_another_cache_entry(folder):
    path = write(folder / "a.jsonl", RECORDS)
    data = PromptFile(path)
    before = load(data)
    for other in ({"system_prompt": "Be brief."}, {"max_prompt_tokens": 8}):
        assert load(data, **other).kept != before.kept
    assert load(PromptFile(path, control_tokens="text")).kept != before.kept
    write(folder / "a.jsonl", [{**RECORDS[0], "answer": 7}, *RECORDS[1:]])
    os.utime(path, ns=(1, 1))
    changed = load(data)
    assert changed.kept != before.kept and changed.problems.fingerprint != before.problems.fingerprint
    assert load(data, max_prompt_tokens=8).total == 9


def test_pairs_steps_and_mixtures_are_cached(folder):
    pairs = [{"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": 0.5, "safe": True, "not": False}]
    keys = {"margin_key": "margin", "safe_keys": ("safe", "not")}
    loaded = load(PairFile(write(folder / "pairs.jsonl", pairs), **keys))
    assert loaded.kept is not None
    assert (loaded.problems[0].margin, loaded.problems[0].safe) == (0.5, (True, False))
    steps = {"prompt": "1+1?", "completions": ["1+1=2", "2"], "labels": [True, False]}
    loaded = load(StepFile(write(folder / "steps.jsonl", [steps])))
    assert loaded.kept is not None and loaded.problems[0].step_labels == (True, False)
    assert loaded.problems[0].step_ends[-1] == len(loaded.problems[0].solution_tokens)
    a = Source(name="a", data=PromptFile(write(folder / "a.jsonl", RECORDS)))
    b = Source(name="b", data=PromptFile(write(folder / "b.jsonl", RECORDS[:2])), system_prompt="Think.")
    mixed = load(Mixture((a, b)))
    assert mixed.kept is not None and [one.source for one in mixed.problems] == ["a"] * 9 + ["b"] * 2
    assert [(name, index.tolist()) for name, index in mixed.problems.sources] == [("a", [*range(9)]), ("b", [9, 10])]


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def replace_by_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [flip_a_bit, replace_by_a_pipe, Path.unlink])
@pytest.mark.parametrize("name", ["rows.arrow", "table.json", "split.json", "checksums.json"])
def test_a_damaged_cache_is_noticed_and_made_again(folder, caplog, name, damage):
    data = PromptFile(write(folder / "a.jsonl", RECORDS), solution_key="solution")
    before = load(data)
    problems = [*before.problems]
    del before  # the mapped file
    [cached] = (folder / "kept").iterdir()
    damage(cached / name)
    released = threading.Timer(20, lambda: os.close(os.open(cached / name, os.O_RDWR)))  # ends a read that waits
    if damage is replace_by_a_pipe:
        released.start()
    assert [*load(data).problems] == problems
    released.cancel()
    [notice] = caplog.messages
    assert notice.startswith(f"the data cache is damaged: {cached}/") and notice.endswith("read and tokenized again")
    assert [*load(data).problems] == problems
    assert len(caplog.messages) == 1 and folders(folder) == [cached.name]


def test_a_damaged_cache_that_cannot_be_removed_is_refused(folder, monkeypatch):
    data = PromptFile(write(folder / "a.jsonl", RECORDS))
    cached = load(data).kept
    flip_a_bit(cached / "rows.arrow")

    def fails(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cache.shutil, "rmtree", fails)
    with pytest.raises(Refusal, match=f"rows.arrow has a wrong checksum.*; delete {cached}, which failed here"):
        load(data)


def test_small_files_are_not_cached(folder, monkeypatch):
    monkeypatch.setattr(cache, "LEAST_BYTES", 2**20)
    assert load(PromptFile(write(folder / "a.jsonl", RECORDS))).kept is None
    assert not (folder / "kept").exists()


def test_compressed_files_count_for_the_text_in_them(folder, monkeypatch):
    plain, packed = write(folder / "a.jsonl", RECORDS * 20), folder / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    monkeypatch.setattr(cache, "LEAST_BYTES", packed.stat().st_size * 5)
    assert load(PromptFile(str(packed))).kept is not None
    monkeypatch.setattr(cache, "LEAST_BYTES", os.path.getsize(plain) + 1)
    assert load(PromptFile(plain)).kept is None


def test_unreadable_files_leave_no_cache_entry(folder):
    path = write(folder / "a.jsonl", [*RECORDS, {"prompt": 3}])
    with pytest.raises(ValueError, match="line 10"):
        load(PromptFile(path))
    assert folders(folder) == []


def test_a_parquet_file_is_read_a_part_at_a_time(tmp_path):
    path = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS * 500), path, row_group_size=1000, compression="gzip")
    damaged = bytearray(path.read_bytes())
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(3).column(0).data_page_offset
    damaged[start : start + 400] = bytes(400)
    path.write_bytes(damaged)
    rows = read_rows(path)
    assert [row.record["answer"] for row, _ in zip(rows, RECORDS, strict=False)] == [2 * n for n in range(9)]
    with pytest.raises(Refusal, match=r"prompts\.parquet: not a readable parquet file"):
        list(rows)


def test_a_misspelled_file_name_is_refused_with_a_suggestion(refused, tmp_path):
    write(tmp_path / "train.jsonl", RECORDS)
    for path in (tmp_path / "trian.jsonl", tmp_path):
        with refused():
            next(read_rows(path))


def test_column_values_are_restored_and_pickles_that_run_code_are_refused(tmp_path):
    """Parquet has values that JSON does not have; somebody may have changed the cached pickles."""
    zone = ZoneInfo("Europe/Berlin")
    record = {
        "when": datetime(2026, 11, 28, 1, 2, 3, 4, zone),
        "day": date(2026, 1, 1),
        "long": timedelta(days=1),
        "price": Decimal("1.10"),
        "raw": b"\x00\xff",
        "nested": [{"a": None, "b": [1.5, True]}],
    }
    table = ProblemTable()
    table.append(0, "p", (1,), "a", (), record)
    assert table[0].record == record

    class Runs:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    table = ProblemTable()
    table.append(0, "p", (1,), "a", (), {"when": Runs()})
    with pytest.raises(pickle.UnpicklingError, match=r"it holds a _?io\.open"):
        table[0]
    assert not (tmp_path / "ran").exists()
