"""Measurement of devices as `Hardware` for plans; `python -m scripts.planning.calibrate` is the command."""
