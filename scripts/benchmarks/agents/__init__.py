"""Benchmarks of agents, their tools and their environments."""
