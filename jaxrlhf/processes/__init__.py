"""Processes that run user code: starting, watching and ending them."""
