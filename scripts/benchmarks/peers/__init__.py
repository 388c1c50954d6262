"""Scripts that measure other frameworks, each run in that framework's own environment: on CPU, without a network."""

import os

# Before the script imports its framework, which reads some of these variables while it is imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"WANDB_MODE": "disabled", "TRL_EXPERIMENTAL_SILENCE": "1", "JAX_PLATFORMS": "cpu"}
