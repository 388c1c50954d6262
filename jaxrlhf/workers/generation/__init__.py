"""Generation of a rollout: requests of an engine, and the arrays of what it completes."""
