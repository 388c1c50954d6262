"""Import and export of Hugging Face checkpoints and adapters."""
