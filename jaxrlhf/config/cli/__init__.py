"""Loading, overriding and recording of configurations, from files and command lines."""
