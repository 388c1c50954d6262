"""Batches of a step: estimates, minibatches and metrics of collected responses, episodes and pairs."""
