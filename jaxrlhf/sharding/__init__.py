"""Meshes and sharding rules: which devices hold which slice of an array."""

__all__: list[str] = []
