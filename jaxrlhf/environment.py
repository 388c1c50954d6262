"""What has to be in the environment before JAX starts; imported first, for its effect."""

import os

# XLA:CPU sizes its thread pool from this. With several CPU devices on few cores, their
# collectives wait for each other for ever in a pool that is smaller.
os.environ.setdefault("NPROC", "32")
