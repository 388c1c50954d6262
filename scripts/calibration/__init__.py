"""Measurement of devices as `Hardware` for plans; `scripts/calibrate.py` is the command."""
