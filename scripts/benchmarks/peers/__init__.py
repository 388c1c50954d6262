"""Scripts that measure other frameworks, each run in that framework's own environment."""
