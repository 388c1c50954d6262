"""Measurements of TRL's trainers."""
