"""Checkpoint families as tables. A new family of the same decoder is one more `Family` and its name here."""

from jaxrlhf.models.huggingface.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxrlhf.models.huggingface.families.family import LM_HEAD, SCALAR_HEAD, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.gemma import GEMMA2, GEMMA3
from jaxrlhf.models.huggingface.families.llama import LLAMA, MISTRAL, MIXTRAL, OLMO2, PHI3
from jaxrlhf.models.huggingface.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from jaxrlhf.models.huggingface.families.rope_fields import read_rope, write_rope

_ALL = QWEN2, QWEN3, LLAMA, MISTRAL, PHI3, OLMO2, GEMMA2, GEMMA3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
