"""Tokenized problems of a split in columns: in memory, or memory-mapped from disk."""
