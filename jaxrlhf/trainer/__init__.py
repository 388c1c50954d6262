"""Trainer of a run, from its configuration to its last checkpoint: loop, evaluation, logging, resume and export."""
