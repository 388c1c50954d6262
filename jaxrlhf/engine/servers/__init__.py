"""Engines that are servers of their own: what is asked of them, and a rollout engine that asks."""
