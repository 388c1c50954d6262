"""Mixtures of experts: routing and grouped matrix products."""
