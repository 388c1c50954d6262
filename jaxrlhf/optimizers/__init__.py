"""Optimizers of optax from settings, learning rates by parameter group, and layouts of optimizer state."""
