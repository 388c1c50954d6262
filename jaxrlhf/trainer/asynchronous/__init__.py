"""Asynchronous schedules: steps learn from responses of older policies while newer responses are generated."""
