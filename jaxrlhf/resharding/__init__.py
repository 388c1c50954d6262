"""Resharding: moves of arrays between training and generation layouts, between pools, and to the host and back."""
