"""Tasks of reasoning-gym, as a user names them."""

from jaxrlhf.environments.reasoning_gym import ReasoningGym

sums = ReasoningGym("chain_sum", size=20, seed=3, prompt=" Say the number.")
