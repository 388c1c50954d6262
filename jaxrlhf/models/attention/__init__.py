"""Attention: its forms, masks, caches and the choice of a kernel."""
