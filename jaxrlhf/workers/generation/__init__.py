"""Rollout generation by workers: requests to an engine, and completions as arrays."""
