"""Episodes of several turns: the policy replies, its environment answers, until one of them ends it."""

from jaxrlhf.agent_loop.loop import AgentLoop
