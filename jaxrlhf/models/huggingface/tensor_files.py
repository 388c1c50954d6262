"""Tensors of a checkpoint directory: one safetensors file, several files with an index, or a GGUF file."""

import json
import warnings
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.models.huggingface.gguf_folder import LINK as GGUF_LINK
from jaxrlhf.models.huggingface.gguf_tensors import GgufTensors
from jaxrlhf.models.huggingface.quantized_files import BLOCKS, SCALE_INV, SCALES, Fp8, Mxfp4, mapped, plain_names
from jaxrlhf.models.huggingface.text_part import part_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model*.bin", "*.pth")
"""Patterns of the names of weight files that are not read."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtypes of weights and their names in the files, in the order in which files store tensors."""


class TensorFiles:
    """Tensors by name, read slice by slice. A context manager: it holds files open.

    Tensors of towers are left out with a warning, and the other tensors have their names in a text-only checkpoint.

    Args:
      vision: Read vision towers, too.

    Attributes:
      file_of: File name of each tensor.
      absent: File names by tensor name, for tensors that the index puts into a file without them. The model may not
        need these tensors.

    Raises:
      Refusal: There are no safetensors, or a file is missing or damaged.
    """

    def __init__(self, directory: Path, *, vision: bool = False):
        self.directory = directory
        self._open: dict[str, Any] = {}
        self.absent: dict[str, str] = {}
        if (directory / SINGLE).is_file():
            self.file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        elif (directory / INDEX).is_file():
            self.file_of = self._read_index()
        elif (directory / GGUF_LINK).is_file():
            self._open[GGUF_LINK] = GgufTensors(directory / GGUF_LINK)
            self.file_of = dict.fromkeys(self._open[GGUF_LINK].keys(), GGUF_LINK)
        else:
            pickled = sorted(file.name for pattern in PICKLED for file in directory.glob(pattern))
            there = f", but {pickled[0]}, a pickle, which may run code when loaded" if pickled else ""
            raise Refusal(
                f"{directory} has neither {SINGLE} nor {INDEX}{there}; if you trust its author, convert it to "
                "safetensors with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        self._name_of = part_tensors(self.file_of, vision=vision)
        if left_out := sorted(self.file_of.keys() - self._name_of.values()):
            warnings.warn(
                f"{directory} contains more than a text model; {len(self.file_of) - len(self._name_of)} tensors are "
                f"not read, such as {left_out[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._held = self.file_of
        names = self._name_of
        self._name_of = plain_names(names, lambda name: self._file(self._held[name]).get_slice(name).get_dtype())
        self._scale_of = {name: names[name + SCALE_INV] for name in self._name_of if name + SCALE_INV in names}
        self.file_of = {ours: self._held[theirs] for ours, theirs in self._name_of.items()}

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def __getitem__(self, name: str) -> Any:
        """Return a tensor that is read when it is sliced."""
        held = self._name_of[name]
        if name in self._scale_of:
            scale = self._scale_of[name]
            return Fp8(mapped(self.directory / self._held[held], held), self._file(self._held[scale]).get_tensor(scale))
        if held.endswith(BLOCKS) and not name.endswith(BLOCKS):
            return Mxfp4(self._stored(held), self._stored(held.removesuffix(BLOCKS) + SCALES))
        return self._stored(held)

    def _stored(self, held: str) -> Any:
        """Return a tensor by its name in its file."""
        return self._file(self._held[held]).get_slice(held)

    def where(self, name: str) -> str:
        """Return the file of a tensor, for messages."""
        return str(self.directory / self.file_of[name])

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of each tensor, without tensors in unsupported dtypes."""
        ours = {kind: dtype for dtype, kind in DTYPES.items()}
        kinds = {name: self[name].get_dtype() for name in self.file_of}
        return {name: ours[kind] for name, kind in kinds.items() if kind in ours}

    def _read_index(self) -> dict[str, str]:
        try:
            file_of = dict(json.loads((self.directory / INDEX).read_text())["weight_map"])
            "".join(file_of.values())  # TypeError if a file name is no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refusal(f"{self.directory / INDEX} is not an index ({error!r}); download it again") from error
        held: dict[str, set[str]] = {}
        for name, file in file_of.items():
            if file not in held:
                held[file] = set(self._file(file, name).keys())
            if name not in held[file]:
                self.absent[name] = file
        return {name: file for name, file in file_of.items() if name not in self.absent}

    def _file(self, name: str, tensor: str | None = None) -> Any:
        """Return an open file.

        Args:
          tensor: Name of the wanted tensor, for messages.
        """
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            file = self.directory / name
            wanted = "" if tensor is None else f", but {INDEX} lists tensor {tensor!r} there"
            if not file.is_file():
                raise Refusal(
                    f"{file} is missing{wanted}, so the checkpoint is incomplete; download or export it again"
                )
            try:
                self._open[name] = safe_open(file, framework="numpy").__enter__()
            except (SafetensorError, OSError) as error:
                raise Refusal(
                    f"{file} is damaged or incomplete ({error}){wanted}; download or export it again"
                ) from error
        return self._open[name]
