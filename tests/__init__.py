"""Tests by room of the package; what several files use is in `support/`, recorded results in `golden/`."""
