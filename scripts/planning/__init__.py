"""Calibration of the planner, its predictions beside measurements, and tables of plans."""
