"""Folders from which servers load weights: a whole checkpoint, or only the tensors that changed."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.models.huggingface.save import save_tensors

MANIFEST = "manifest.json"
_LAYER = re.compile(r".*?\.\d+\.")


class _Digest(NamedTuple):
    """Digest of a tensor's bytes, and the tensor's shape and dtype."""

    text: str
    tensor: jax.ShapeDtypeStruct


@dataclass(eq=False)
class WeightFiles:
    """Folders of one run's weights; the newest is kept.

    With `changed`, each tensor is compared with the last version by a digest of its bytes. Beside the tensors,
    `manifest.json` has the digests of all tensors and the name of the version to which the folder is a change.

    Attributes:
      folder: Folder for the folders `version_*`.
      which: Tensors in a folder: all (`whole`), or only what `changed` where all servers have the last version.
      save: Function that writes weights to a folder as a checkpoint.
      dtype: Dtype of the tensors in that checkpoint.
      newest: Name of the newest weights, which is the path of their folder; empty before the first `write`.
    """

    folder: Path
    which: Literal["whole", "changed"]
    save: Callable[[PolicyWeights, Path], None]
    dtype: Any
    newest: str = ""
    _digests: dict[str, _Digest] = field(default_factory=dict)

    def write(self, weights: PolicyWeights, *, on_last: bool) -> Path | None:
        """Write weights and return their folder; None if no tensor changed, so that there is nothing to load.

        Args:
          on_last: True if every server has the weights of the last call.
        """
        if self.which == "whole":
            folder = self._new_folder(f"version_{weights.version}")
            self.save(weights, folder)
            return folder
        digests = {name: _digest(tensor) for name, tensor in weights.tensors(self.dtype)}
        base, sent = None, set(digests)
        if on_last:
            base, sent = self.newest, _with_layers(digests, {name for name in digests if self._changed(name, digests)})
        self._digests = digests
        if not sent:
            return None
        texts = {name: digest.text for name, digest in sorted(digests.items())}
        whole = hashlib.blake2b(json.dumps(texts).encode(), digest_size=6).hexdigest()
        folder = self._new_folder(f"version_{weights.version}_{whole}")
        if base is None:
            self.save(weights, folder)
        else:
            save_tensors(weights.tensors(self.dtype), {name: digests[name].tensor for name in sent}, folder)
        manifest = {"version": weights.version, "base": base, "sent": sorted(sent), "digests": texts}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        return folder

    def drop_older(self) -> None:
        """Delete all folders but the newest."""
        for older in self.folder.glob("version_*"):
            if str(older.absolute()) != self.newest:
                shutil.rmtree(older)

    def _new_folder(self, name: str) -> Path:
        folder = (self.folder / name).absolute()
        shutil.rmtree(folder, ignore_errors=True)  # left over from a killed run
        self.newest = str(folder)
        return folder

    def _changed(self, name: str, digests: dict[str, _Digest]) -> bool:
        return name not in self._digests or self._digests[name].text != digests[name].text


def num_bytes(folder: Path) -> int:
    """Return the size of the tensors in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _digest(tensor: np.ndarray) -> _Digest:
    content = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    described = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
    return _Digest(hashlib.blake2b(content, digest_size=16).hexdigest(), described)


def _with_layers(names: Iterable[str], changed: set[str]) -> set[str]:
    """Return the changed tensors with all tensors of their layers, or of their modules outside of the layers.

    vLLM fuses matrices of a layer, and loads a fused matrix whole or not at all.
    """
    together = {_loaded_with(name) for name in changed}
    return {name for name in names if _loaded_with(name) in together}


def _loaded_with(name: str) -> str:
    layer = _LAYER.match(name)
    return layer[0] if layer else name.rpartition(".")[0]
