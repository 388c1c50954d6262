"""Serving: an engine behind OpenAI's API, and the sessions of agents that learn through it."""

from jaxrlhf.serving.server import Server
from jaxrlhf.serving.sessions import RecordedEpisode, SessionBook
