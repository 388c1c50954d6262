"""Conversations: chat messages as tokens, from the first prompt to the last reply, and what a reply says.

No other room makes tokens of messages once an episode has begun.
"""

from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.conversation import Conversation, TokenSequence
from jaxrlhf.conversations.template_facts import TemplateFacts, check_template
