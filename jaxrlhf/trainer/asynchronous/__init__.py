"""Schedules that learn from responses of older policies while newer ones are drawn."""
