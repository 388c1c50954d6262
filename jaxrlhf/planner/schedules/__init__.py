"""Asynchronous schedules, predicted: seconds of a step, idle pools, and the age of tokens that are learnt from."""
