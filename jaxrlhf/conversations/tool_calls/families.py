"""Form of tool calls that a chat template asks for."""

from collections.abc import Collection
from types import ModuleType

from jaxrlhf.conversations.tool_calls import (
    deepseek,
    embedded,
    gemma,
    glm,
    gpt_oss,
    hermes,
    kimi,
    llama,
    minimax,
    mistral,
    pythonic,
    qwen_xml,
)

FAMILIES = (*(deepseek, kimi, minimax, glm, qwen_xml, mistral, pythonic, hermes, gpt_oss, gemma, llama, embedded),)
"""Forms, the more special ones first: the first whose sign a template shows is taken."""


def family(template: str, tags: Collection[str]) -> ModuleType:
    """Module that reads the calls of a chat template; JSON in `<tool_call>` where the template shows none.

    Args:
      tags: Tokens of the vocabulary's own.
    """
    for found in FAMILIES:
        if any(sign in template or sign in tags for sign in found.SIGNS):
            return found
    return hermes
