"""Inference with trained policies: loading into an engine for serving, and completions of a file of prompts."""
