"""Batches of a step: estimates, minibatches and metrics of what was collected."""
