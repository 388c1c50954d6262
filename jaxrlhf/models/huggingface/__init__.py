"""Hugging Face checkpoints and adapters, read and written."""
