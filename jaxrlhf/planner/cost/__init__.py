"""Seconds and bytes of a step, predicted."""
