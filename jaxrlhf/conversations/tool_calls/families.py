"""Choice of the form of tool calls that a chat template uses."""

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
"""Modules of the forms, the most specific first; the first module with a sign in the template is used."""


def family(template: str, tags: Collection[str]) -> ModuleType:
    """Return the module that parses the calls of a chat template; by default, JSON in `<tool_call>`.

    Args:
      tags: Added tokens of the vocabulary.
    """
    for found in FAMILIES:
        if any(sign in template or sign in tags for sign in found.SIGNS):
            return found
    return hermes
