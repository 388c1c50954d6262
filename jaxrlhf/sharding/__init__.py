"""Meshes and sharding rules: which devices hold which slice of an array."""
