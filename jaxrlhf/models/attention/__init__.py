"""Attention: variants, masks, caches and kernel choice."""
