"""Tool calls in the forms of their families, and the tools that they are of."""

from jaxrlhf.conversations.tool_calls.signatures import Signatures
