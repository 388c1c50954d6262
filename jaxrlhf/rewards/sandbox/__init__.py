"""Sandbox for programs in responses: runs them and checks them against tests."""
