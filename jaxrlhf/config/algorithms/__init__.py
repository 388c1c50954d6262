"""Settings of the algorithms, one file per family."""
