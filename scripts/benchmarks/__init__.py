"""Benchmarks of single parts, of whole steps, and of this project beside TRL and Tunix."""
