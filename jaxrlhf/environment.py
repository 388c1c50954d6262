"""What has to be in the environment before JAX and transformers start; imported first, for its effect."""

import os

# XLA:CPU sizes its thread pool from this. With several CPU devices on few cores, their
# collectives wait for each other for ever in a pool that is smaller.
os.environ.setdefault("NPROC", "32")

# Models run in JAX here; transformers, which reads tokenizers, would advise to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
