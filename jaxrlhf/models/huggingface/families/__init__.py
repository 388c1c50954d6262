"""Checkpoint families as tables. A new family of the same decoder is one more file and line here."""

from jaxrlhf.models.huggingface.families.deepseek_v2 import DEEPSEEK_V2
from jaxrlhf.models.huggingface.families.deepseek_v3 import DEEPSEEK_V3
from jaxrlhf.models.huggingface.families.family import LM_HEAD, SCALAR_HEAD, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.gemma2 import GEMMA2
from jaxrlhf.models.huggingface.families.gemma3 import GEMMA3
from jaxrlhf.models.huggingface.families.llama import LLAMA
from jaxrlhf.models.huggingface.families.mistral import MISTRAL
from jaxrlhf.models.huggingface.families.mixtral import MIXTRAL
from jaxrlhf.models.huggingface.families.olmo2 import OLMO2
from jaxrlhf.models.huggingface.families.phi3 import PHI3
from jaxrlhf.models.huggingface.families.qwen2 import QWEN2
from jaxrlhf.models.huggingface.families.qwen3 import QWEN3
from jaxrlhf.models.huggingface.families.qwen3_moe import QWEN3_MOE
from jaxrlhf.models.huggingface.families.rope_fields import read_rope, write_rope

FAMILIES: dict[str, Family] = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}

__all__ = ["FAMILIES", "LM_HEAD", "SCALAR_HEAD", "Family", "Fields", "StoredTensor", "read_rope", "write_rope"]
