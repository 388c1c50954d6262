"""Games of gymnasium, as a user names them."""

from jaxrlhf.environments.gymnasium import Gymnasium

MOVES = ("left", "down", "right", "up")
lake = Gymnasium("FrozenLake-v1", actions=MOVES, prompt="Go to G.", is_slippery=False, render_mode="ansi")
slippery = Gymnasium("FrozenLake-v1", actions=MOVES, is_slippery=True, render_mode="ansi")
taxi = Gymnasium("Taxi-v4", actions=("south", "north", "east", "west", "pickup", "dropoff"), render_mode="ansi")
blackjack = Gymnasium("Blackjack-v1")
