"""Checkpoint families as tables. A new family of the same decoder is one more file and line here."""

from jaxrlhf.models.families.family import LM_HEAD, SCALAR_HEAD, Family, Stored
from jaxrlhf.models.families.llama import LLAMA
from jaxrlhf.models.families.qwen2 import QWEN2
from jaxrlhf.models.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA}

__all__ = ["FAMILIES", "LM_HEAD", "SCALAR_HEAD", "Family", "Stored"]
