"""Checksums of large files, which several threads read in parts."""

import json
import random
import zlib

import pytest

from jaxrlhf.runtime import checksums


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 123_457])
@pytest.mark.parametrize("content", ["random", "low", "high"])
def test_the_checksum_of_a_file_in_parts_is_that_of_the_whole_file(tmp_path, monkeypatch, size, content):
    monkeypatch.setattr(checksums, "PART_BYTES", 1000)
    data = (
        random.Random(size).randbytes(size) if content == "random" else {"low": b"\0", "high": b"\xff"}[content] * size
    )
    (tmp_path / "file").write_bytes(data)
    checksums.write_checksums(tmp_path)
    assert json.loads((tmp_path / checksums.FILE).read_text())["file"] == [size, zlib.adler32(data)]
    assert checksums.damage_of(tmp_path, checked=True) is None


def test_parts_that_change_places_are_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "PART_BYTES", 1000)
    first, second = random.Random(0).randbytes(1000), random.Random(1).randbytes(1000)
    (tmp_path / "file").write_bytes(first + second)
    checksums.write_checksums(tmp_path)
    (tmp_path / "file").write_bytes(second + first)
    damage = checksums.damage_of(tmp_path, checked=True)
    assert damage is not None and damage.startswith(f"{tmp_path / 'file'} has a wrong checksum")
