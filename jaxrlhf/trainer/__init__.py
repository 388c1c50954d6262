"""A run from its configuration to its last checkpoint: the loop, evaluation, logging, resume and export."""
