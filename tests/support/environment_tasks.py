"""Tasks of reasoning-gym, as a user names them."""

from jaxrlhf.environments.reasoning_gym import ReasoningGym

sums = ReasoningGym("chain_sum", size=20, seed=3, prompt=" Say the number.")
letters = ReasoningGym("letter_counting", size=512, seed=0, min_words=1, max_words=3)  # four of five answers are 1
