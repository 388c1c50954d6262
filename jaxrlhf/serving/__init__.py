"""Serving: an engine behind OpenAI's API, and the sessions of agents that learn through it.

The server, `jaxrlhf.serving.server`, needs the extra `serve`; the sessions do not.
"""
