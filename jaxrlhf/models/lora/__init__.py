"""Adapters of low rank and the quantised weights beside them."""
