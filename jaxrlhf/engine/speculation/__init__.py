"""Speculative decoding: drafts from texts that the engine has seen, verified by the engine's own forward pass."""
