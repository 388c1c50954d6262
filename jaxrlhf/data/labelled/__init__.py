"""Labelled answers: preference pairs, and solutions whose steps are labelled."""
