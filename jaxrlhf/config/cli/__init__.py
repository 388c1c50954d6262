"""Configuration files and command lines: loading, overriding, recording."""
