"""Rewards of code: programs in a sandbox, and the tests that they have to pass."""
