"""Labeled answers: preference pairs, and solutions whose steps are labeled."""
