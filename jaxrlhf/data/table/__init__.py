"""Tokenised problems of a split in columns: in memory, or on disk and mapped into memory."""
