"""Chats of records: messages in the form of chat templates, and prompts and answers rendered by a template."""
