"""Predictions for asynchronous schedules: seconds of a step, idle time of pools, and age of the trained tokens."""
