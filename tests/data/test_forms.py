"""Forms of data files: narrow floats, times, JSON, folders and cards, compared with `datasets`."""

import bz2
import codecs
import functools
import gzip
import json
import lzma
import subprocess
import sys
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets.data_files import resolve_pattern

from jaxrlhf.config import HubData, PromptFile, Refusal
from jaxrlhf.data.files import lines
from jaxrlhf.data.hub import record_files
from jaxrlhf.data.records import read_rows, record_at
from tests.data.test_hub import answers

SHORT = {
    "float16": ["0.1", "3.14", "1000.0", "-2.5", "0.0001"],
    "float32": ["0.1", "3.14", "123456.7", "16777216.0", "1e-5", "-0.3", "72.0", "0.3333333", "1e10"],
    "float64": ["0.1", "3.14", "123456.7", "0.10000000149011612", "1e-7", "0.30000000000000004"],
}


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("outer", [None, "reward_model"])
def test_a_number_becomes_the_shortest_text_of_its_type(tmp_path, kind, outer):
    column = pa.array(np.array([float(text) for text in SHORT[kind]], kind))
    column = column if outer is None else pa.StructArray.from_arrays([column], ["ground_truth"])
    prompts = pa.array(["x"] * len(SHORT[kind]))
    table = pa.table({"prompt": prompts, outer or "answer": column})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = answers(PromptFile(str(tmp_path / "a.parquet")))
    assert [float(text) for text in found] == [float(text) for text in SHORT[kind]]
    assert found == [np.format_float_positional(np.dtype(kind).type(text), trim="0") for text in SHORT[kind]]


def test_other_numbers_keep_their_text(tmp_path):
    texts = "0.10000000149011612", "1.50", "7", '"0.10"'
    lines = ['{"prompt": "x", "answer": ' + text + "}\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    assert answers(PromptFile(str(tmp_path / "a.jsonl"))) == ["0.10000000149011612", "1.5", "7", "0.10"]


NANOSECONDS = """
import sys
class Missing:
    def find_spec(name, *_):
        if name == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, Missing)
from jaxrlhf.data.hub import record_files
from jaxrlhf.data.records import read_rows, record_at
[row] = read_rows(sys.argv[1])
print({key: str(value) for key, value in row.record.items()})
assert record_at(sys.argv[1], 1) == row.record
"""


def test_times_of_nanoseconds_need_no_pandas(tmp_path):
    ns = 1_700_000_000_123_456_789
    table = pa.table(
        {
            "when": pa.array([ns], pa.timestamp("ns")),
            "took": pa.array([1_000_001_001], pa.duration("ns")),
            "each": pa.array([[{"at": ns}]], pa.list_(pa.struct([("at", pa.timestamp("ns", "UTC"))]))),
            "large": pa.array([[ns]], pa.large_list(pa.timestamp("ns"))),
            "fixed": pa.array([[ns, ns]], pa.list_(pa.timestamp("ns"), 2)),
            "map": pa.array([[("a", ns)]], pa.map_(pa.string(), pa.timestamp("ns"))),
            "whole": pa.array([ns // 1000], pa.timestamp("us")),
            "answer": ["1"],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ran = subprocess.run([sys.executable, "-c", NANOSECONDS, tmp_path / "a.parquet"], capture_output=True, text=True)
    assert not ran.returncode, ran.stderr
    assert "'when': '2023-11-14 22:13:20.123456'" in ran.stdout and "'took': '0:00:01.000001'" in ran.stdout
    assert "2023, 11, 14, 22, 13, 20, 123456" in ran.stdout and "'whole': '2023-11-14 22:13:20.123456'" in ran.stdout


# Kinds of files

RECORDS = [{"prompt": "1+1?", "answer": 2}, {"prompt": "2+2?", "answer": 4, "more": {"a": [1, None]}}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
LIST = json.dumps(RECORDS, indent=1).encode()


def zstandard(text):
    return pa.compress(text, codec="zstd", asbytes=True)


KINDS = {
    **dict.fromkeys(("a.jsonl", "a.ndjson", "a.json", "a.b.json"), LINES),
    **{f"list{n}.json": start + LIST for n, start in enumerate((b"", b"\n  ", b"\xef\xbb\xbf"))},
    **{f"{name}.gz": gzip.compress(text) for name, text in (("a.jsonl", LINES), ("a.json", LIST), ("a.ndjson", LINES))},
    **{f"{name}.bz2": bz2.compress(text) for name, text in (("a.jsonl", LINES), ("b.json", LIST))},
    **{f"{name}.xz": lzma.compress(text) for name, text in (("a.jsonl", LINES), ("b.json", LIST))},
    **{f"{name}.zst": zstandard(text) for name, text in (("a.jsonl", LINES), ("b.json", LIST))},
    "frames.jsonl.zst": zstandard(LINES[:30]) + zstandard(LINES[30:]),
}


@pytest.mark.parametrize("name", KINDS)
def test_json_is_read_in_all_forms(tmp_path, name):
    (tmp_path / name).write_bytes(KINDS[name])
    assert answers(PromptFile(str(tmp_path / name))) == ["2", "4"]
    rows = [*read_rows(tmp_path / name)]
    assert [row.record for row in rows] == RECORDS
    for row in rows:
        path, _, number = row.source.rpartition("#")
        assert record_at(path, int(number)) == row.record


CELLS = b'prompt,answer\r\n1+1?,007\r\n"a ""b""\nc, d",1.10\r\n'
CELL_RECORDS = [{"prompt": "1+1?", "answer": "007"}, {"prompt": 'a "b"\nc, d', "answer": "1.10"}]
TABS = CELLS.replace(b",", b"\t").replace(b"c\t", b"c,")
QUOTED = codecs.BOM_UTF8 + CELLS.replace(b"prompt,answer", b'"prompt","answer"')
CELL_KINDS = {
    "a.csv": CELLS,
    "newline.csv": CELLS.replace(b"\r\n", b"\n"),
    "mark.csv": codecs.BOM_UTF8 + CELLS,
    "quoted.csv": QUOTED,
    "a.tsv": TABS,
    "a.csv.gz": gzip.compress(QUOTED),
    "a.csv.bz2": bz2.compress(CELLS),
    "a.tsv.xz": lzma.compress(TABS),
    "a.csv.zst": zstandard(CELLS),
}


@pytest.mark.parametrize("name", CELL_KINDS)
def test_cells_of_csv_stay_texts(tmp_path, name):
    (tmp_path / name).write_bytes(CELL_KINDS[name])
    assert answers(PromptFile(str(tmp_path / name))) == ["007", "1.10"]
    rows = [*read_rows(tmp_path / name)]
    assert [row.record for row in rows] == CELL_RECORDS
    for row in rows:
        path, _, number = row.source.rpartition("#")
        assert record_at(path, int(number)) == row.record


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b'{"data": [\n{"prompt": "x"}]}', "line 1: not valid JSON"),
        ("a.json", b'[{"prompt": "x"}', r"a\.json: not valid JSON .*a list of objects, or one object a line"),
        ("a.json", b'["x"]', "record 1: expected a JSON object, got str"),
        ("a.json", b"[]", "holds no records"),
        ("a.json", b"[" * 100_000, r"a\.json: not valid JSON"),
        ("a.jsonl.bz2", bz2.compress(LINES)[:-9], r"damaged \.bz2 file"),
        ("a.jsonl.bz2", b"no", r"damaged \.bz2 file"),
        ("a.jsonl.xz", lzma.compress(LINES)[:-20], r"damaged \.xz file"),
        ("a.jsonl.xz", b"no", r"damaged \.xz file"),
        ("a.jsonl.zst", zstandard(LINES)[:-5], r"damaged \.zst file"),
        ("a.jsonl.zst", b"nothing of this kind", r"damaged \.zst file"),
        ("a.jsonl.zip", b"x", r"unpack it first, for example by unzip a\.jsonl\.zip$"),
        ("a.csv", b"prompt\n", r"a\.csv: the file holds no records"),
        ("a.csv", b"", r"a\.csv: the file holds no records"),
        (
            "a.csv",
            b"prompt,answer\nx,1,2\n",
            r"a\.csv, line 2: 3 cells, and the first line names \['prompt', 'answer'\]",
        ),
        ("a.csv", b"prompt,answer\nx\n", r"a\.csv, line 2: 1 cells, and the first line names"),
        ("a.csv", b"prompt,prompt\nx,1\n", r"a\.csv: the first line must name each column once"),
        ("a.csv", b"prompt,\nx,1\n", r"a\.csv: the first line must name each column once"),
        ("a.csv", b'prompt,answer\n"x"y,1\n', r"a\.csv, line 2: not valid CSV"),
        ("a.csv", b"prompt,answer\nx,\xff\n", r"a\.csv, line 1: not valid CSV"),
        ("a.tsv.gz", b"no", r"damaged \.gz file"),
    ],
)
def test_unreadable_files_are_refused_in_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=words) as refused:
        answers(PromptFile(str(tmp_path / name)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("answer", [True, ["4", "four"], [4], {"target": ["4"]}])
def test_an_answer_that_is_no_single_text_is_refused(tmp_path, answer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x", "answer": answer}))
    with pytest.raises(Refusal, match=r"line 1: 'answer' is .*an answer is one text or number; .*answer_key=None"):
        answers(PromptFile(str(tmp_path / "a.jsonl")))
    assert answers(PromptFile(str(tmp_path / "a.jsonl"), answer_key=None)) == [None]


def test_a_path_may_be_a_pattern(tmp_path):
    for name, number in (("b-0.jsonl", 1), ("b-1.jsonl", 2), ("sub/b-2.jsonl", 3), ("c[1].jsonl", 4)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": "x", "answer": number}))
    for pattern, right in (("b-*.jsonl", "12"), ("**/b-*.jsonl", "123"), ("b-[1-9].jsonl", "2"), ("c[1].jsonl", "4")):
        assert "".join(answers(PromptFile(str(tmp_path / pattern)))) == right
    with pytest.raises(Refusal, match="no file name matches this pattern"):
        answers(PromptFile(str(tmp_path / "d-*.jsonl")))


# Folders and cards


def folder(path, files, card=None):
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"prompt": "x", "answer": name}) + "\n")
    if card is not None:
        (path / "README.md").write_text(f"---\n{card}\n---\n")
    return path


FILES = [
    *("a.jsonl", "data/a.jsonl", "data/x/b.jsonl", "data/x/y/c.jsonl", "data/train-0.jsonl", "data/train-1.jsonl"),
    *("data/.h/z.jsonl", "data/._a.jsonl", "data/a+b.jsonl", "train/a.jsonl", "__MACOSX/a.jsonl", "data/(1).jsonl"),
]
PATTERNS = [
    *("data/*.jsonl", "data/**/*.jsonl", "**/*.jsonl", "*.jsonl", "data/**", "**", "data/*", "data/*/*", "*/a.jsonl"),
    *("data/train-[0-9].jsonl", "data/train-[!0].jsonl", "data/?.jsonl", "**/a.jsonl", "data/a+b.jsonl", "data/(1).*"),
    *("data/x/**/c.jsonl", "data/x/**/b.jsonl", "**/x/*", "data/train-*"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_pattern_of_a_card_is_read_as_datasets_does(tmp_path, pattern):
    card = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: '{pattern}'"
    path = folder(tmp_path, FILES, card)
    right = sorted(str(file).removeprefix(f"{path}/") for file in resolve_pattern(pattern, str(path)))
    right = [name for name in right if name.endswith(".jsonl")]
    assert answers(HubData(str(path))) == right and right


@pytest.mark.parametrize(
    "hidden",
    [
        ".ipynb_checkpoints/train-checkpoint.jsonl",
        ".git/x/train.jsonl",
        "._train.jsonl",
        "__MACOSX/._train.jsonl",
        ".train.jsonl",
    ],
)
def test_hidden_files_are_skipped_as_datasets_does(tmp_path, hidden):
    path = folder(tmp_path / "data", ["train.jsonl", hidden])
    right = datasets.load_dataset(str(path), split="train", cache_dir=str(tmp_path / "cache"))["answer"]
    assert answers(HubData(str(path))) == [*right] == ["train.jsonl"]


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("configs:\n- data_files: a.jsonl", "has a configuration without config_name"),
        (
            "configs:\n- config_name: default\n  data_files: {train: a.jsonl}",
            "has data_files .*expected a path, or a list",
        ),
        ("configs:\n- config_name: default\n  data_files:\n  - {train: a.jsonl}", "each with split and path"),
    ],
)
def test_a_card_of_another_form_is_refused(tmp_path, card, words):
    with pytest.raises(Refusal, match=rf"the README\.md of the directory .*{words}"):
        answers(HubData(str(folder(tmp_path, ["a.jsonl"], card))))
    simple = "configs:\n- config_name: default\n  data_files: a.jsonl"
    assert answers(HubData(str(folder(tmp_path, ["a.jsonl"], simple)))) == ["a.jsonl"]


def test_json_of_a_split_is_read_unless_there_is_jsonl(tmp_path):
    folder(tmp_path, ["train.json"])
    assert answers(HubData(str(tmp_path))) == ["train.json"]
    folder(tmp_path, ["train.jsonl", "dataset_info.json"])
    assert answers(HubData(str(tmp_path))) == ["train.jsonl"]
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells/train.csv").write_bytes(CELLS)
    assert answers(HubData(str(tmp_path / "cells"))) == ["007", "1.10"]
    folder(tmp_path / "cells", ["train.jsonl"])
    assert answers(HubData(str(tmp_path / "cells"))) == ["train.jsonl"]


def test_data_sets_saved_to_disk_are_read(tmp_path):
    rows = [{"prompt": f"{n}+1?", "answer": np.float32(n + 0.1), "at": {"x": [n]}} for n in range(5)]
    made = datasets.Dataset.from_list(rows).cast_column("answer", datasets.Value("float32"))
    chosen = made.select([4, 2, 0, 1])
    chosen.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": chosen, "test": made.select([3])}).save_to_disk(tmp_path / "split")
    datasets.load_from_disk(str(tmp_path / "split"))["train"].map(lambda row: {"answer": -1.0})  # leaves a cache there
    assert [*tmp_path.glob("split/train/cache-*.arrow")]
    right = ["4.1", "2.1", "0.1", "1.1"]
    for data in (
        PromptFile(str(tmp_path / "one")),
        PromptFile(f"{tmp_path}/split/train"),
        HubData(f"{tmp_path}/split"),
    ):
        assert answers(data) == right
    [row, *_] = read_rows(record_files(str(tmp_path / "one"))[0])
    path, _, number = row.source.rpartition("#")
    assert record_at(path, int(number)) == row.record == chosen[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda path: PromptFile(f"{path}/split"), "name one, such as .*split/train"),
        (lambda path: HubData(f"{path}/one"), "PromptFile.* and PairFile read this folder"),
        (lambda path: PromptFile(f"{path}/damaged.arrow"), "not a readable arrow file"),
    ],
)
def test_saved_folders_that_are_no_split_are_refused_with_advice(tmp_path, data, words):
    made = datasets.Dataset.from_list([{"prompt": "1+1?", "answer": "2"}])
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "split")
    [stream] = (tmp_path / "one").glob("*.arrow")
    (tmp_path / "damaged.arrow").write_bytes(stream.read_bytes()[:-300])
    with pytest.raises(Refusal, match=words) as refused:
        answers(data(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"_data_files": [1]}', '{"_data_files": 1}'])
def test_a_damaged_list_of_a_saved_data_set_is_named(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(Refusal, match=r"state\.json .*save the data set again"):
        record_files(str(tmp_path))


def packed(text, suffix):
    """Compressed text."""
    xz = functools.partial(lzma.compress, preset=0)  # others take a dictionary of 8 MB
    zstd = pa.Codec("zstd").compress
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": xz, ".zst": lambda text: bytes(zstd(text))}
    return pack[suffix](text)


@pytest.mark.parametrize("suffix", lines.COMPRESSED)
def test_a_long_line_of_a_small_compressed_file_is_refused_before_all_of_it_is_unpacked(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(lines, "LONGEST_LINE", 1 << 16)
    path, text = tmp_path / f"a.jsonl{suffix}", b'{"a": "' + b"x" * (1 << 24) + b'"}\n'
    path.write_bytes(packed(b'{"a": "x"}\n' + text, suffix))
    assert path.stat().st_size < 1 << 15
    tracemalloc.start()
    try:
        unpacked = lines.lines_of(path)
        assert next(unpacked) == b'{"a": "x"}\n'
        with pytest.raises(Refusal, match="a line has more than 65536 bytes once it is unpacked"):
            next(unpacked)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", lines.COMPRESSED)
def test_a_large_list_of_a_small_compressed_file_is_refused_before_all_of_it_is_unpacked(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(lines, "LARGEST_LIST", 1 << 16)
    short, long = (tmp_path / f"{name}.json{suffix}" for name in ("short", "long"))
    record = b'{"a": "x"},\n'
    for path, count in ((short, 1000), (long, 1 << 20)):
        path.write_bytes(packed(b"\n [\n" + count * record + b'{"a": "y"}]', suffix))
    assert [row.record["a"] for row in read_rows(short)] == [*"x" * 1000, "y"]
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match=r"long\.json.*the list has more than 65536 bytes once it is unpacked"):
            next(read_rows(long))
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
