"""Policies in an engine that serves them: loaded by name, sized by flags."""
