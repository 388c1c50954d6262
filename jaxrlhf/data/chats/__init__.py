"""Chats of records: their messages as templates take them, and what a template writes of an answer."""
