"""Measured rates of devices and links."""
