"""Exports for others: a card that says what a model is, and the upload to the hub."""
