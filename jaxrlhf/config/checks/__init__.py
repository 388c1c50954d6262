"""Checks of settings against each other, above settings and algorithms."""
