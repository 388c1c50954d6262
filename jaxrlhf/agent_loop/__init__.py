"""Multi-turn episodes: the policy replies and its environment answers, until one of them ends the episode."""

from jaxrlhf.agent_loop.loop import AgentLoop
