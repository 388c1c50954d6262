"""Processes that run code of users: how they are started, watched and ended."""
