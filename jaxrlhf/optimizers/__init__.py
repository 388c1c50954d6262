"""Optimizers of optax as settings name them, learning rates by groups of parameters, and layouts of their state."""
