"""Policies at work for users: in an engine that serves them, and over a file of prompts."""
