"""Conversations: chat messages as tokens, from the first prompt to the last reply, and parsing of replies.

No other subpackage tokenizes messages after an episode has started.
"""

from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.conversation import Conversation, TokenSequence
from jaxrlhf.conversations.template_check import check_template
