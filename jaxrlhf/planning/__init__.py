"""From a configuration to a placement: what is planned, on which hardware, and how it is shown."""
