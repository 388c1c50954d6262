"""Moves of arrays: between training and generation layouts, between pools, to the host and back."""
