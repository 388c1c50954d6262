"""Settings of the algorithms, one file a family."""
