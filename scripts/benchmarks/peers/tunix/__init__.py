"""Measurements of Tunix's trainers and learners."""
