"""Serving: an engine behind OpenAI's API, and sessions of agents that are trained through the API.

The server, `jaxrlhf.serving.server`, needs the extra `serve`; the sessions do not.
"""
