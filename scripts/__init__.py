"""Benchmarks, learning runs, plans and tools, run from the repository's root: `python -m scripts.benchmarks.step`."""
