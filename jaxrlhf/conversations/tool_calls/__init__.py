"""Parsers of tool calls, one for each model family's form, and signatures of tools."""

from jaxrlhf.conversations.tool_calls.signatures import Signatures
