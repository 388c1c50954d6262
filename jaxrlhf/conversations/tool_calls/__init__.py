"""Replies of a policy as words, and tool calls in the forms of their families."""

from jaxrlhf.conversations.tool_calls.reply_parser import ReplyParser
from jaxrlhf.conversations.tool_calls.signatures import Signatures
