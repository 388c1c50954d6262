"""Seconds and peak memory of one update of Tunix's GRPO loss on one long sequence. Prints one JSON line.

    python -m scripts.benchmarks.peers.tunix.long_rows --preset small --tokens 4096 --trained 512 --models DIR

Run this in an environment with google-tunix 0.1.7.

Tunix's model with rematerialized decoder layers and Tunix's loss; gradient, clipping and AdamW in one compiled step,
float32.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl.algo_core import grpo_loss_fn
from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig

from scripts.benchmarks import workload as bench
from scripts.benchmarks.peers import long_row
from scripts.benchmarks.peers.tunix import model as tunix_model

SETTINGS = GRPOConfig(num_generations=2, beta=0.04, epsilon=0.2)
SETTINGS.temperature = 1.0  # as Tunix's learner sets it, from the rollout's temperature


@nnx.jit
def update(model: Any, optimizer: Any, example: TrainExample) -> None:
    """Take one optimizer step on one example, as Tunix's trainer does."""

    def loss(model: Any) -> Any:
        return grpo_loss_fn(model, example, SETTINGS, pad_id=bench.PAD, eos_id=bench.END)

    gradient, _ = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, gradient)


def main() -> None:
    """Update, and print."""
    flags = long_row.arguments(__doc__ or "")
    token_BT = np.random.default_rng(0).integers(2, bench.PRESETS[flags.preset].vocab, (1, flags.tokens), np.int32)
    prompt_BT, completion_BT = (jnp.asarray(part) for part in np.split(token_BT, [flags.tokens - flags.trained], 1))
    logp_BT = jnp.full(completion_BT.shape, -9.0)
    example = TrainExample(
        prompt_ids=prompt_BT,
        prompt_mask=jnp.ones_like(prompt_BT),
        completion_ids=completion_BT,
        completion_mask=jnp.ones_like(completion_BT),
        advantages=jnp.ones(1),
        ref_per_token_logps=logp_BT,
        old_per_token_logps=logp_BT,
    )
    times = []
    with bench.Memory() as memory, jax.set_mesh(tunix_model.MESH):
        model = tunix_model.load(bench.checkpoint(flags.preset, flags.models), qwen2.RematConfig.DECODER)
        adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0))
        optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
        for _ in range(1 + flags.repeats):
            start = time.perf_counter()
            update(model, optimizer, example)
            jax.block_until_ready(nnx.state(model))
            times.append(time.perf_counter() - start)
    long_row.report(flags, times, memory, "google-tunix", "jax", "flax", "optax")


if __name__ == "__main__":
    main()
