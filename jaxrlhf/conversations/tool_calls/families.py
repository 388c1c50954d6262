"""Form of tool calls that a chat template asks for."""

from collections.abc import Collection
from types import ModuleType

from jaxrlhf.conversations.tool_calls import embedded, hermes

FAMILIES = (hermes, embedded)


def family(template: str, tags: Collection[str]) -> ModuleType:
    """Module that reads the calls of a chat template; JSON in `<tool_call>` where the template shows none.

    Args:
      tags: Tokens of the vocabulary's own.
    """
    for found in FAMILIES:
        if any(sign in template or sign in tags for sign in found.SIGNS):
            return found
    return hermes
