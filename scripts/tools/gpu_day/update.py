"""Benchmark of forward passes and updates: tokens per second and share of the card's peak rate (MFU).

python -m scripts.tools.gpu_day.update --size 0.5B --sequences 64 --tokens 512 --microbatch 16384 [--remat full]
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, get_args

import jax
import numpy as np

from jaxrlhf import models
from jaxrlhf.algos import policy_objective
from jaxrlhf.batch import RolloutBatch
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import (
    GRPO,
    Checkpointing,
    Config,
    Evaluation,
    FunctionReward,
    KLInLoss,
    Optimizer,
    Pretrained,
    PromptFile,
    Remat,
    Rewards,
    Rollout,
    Training,
)
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.planner.cost.cost import head_flops, layer_flops
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.workers.build import Phase
from scripts.benchmarks import update
from scripts.tools.gpu_day.report import SIZES, random_params, refused, say


def config_of(model: Path, flags: argparse.Namespace) -> Config:
    """Return a GRPO configuration of one update; only its actor is built."""
    return Config(
        name="gpu_day",
        algorithm=GRPO(kl=KLInLoss(coefficient=0.04), responses_per_update=flags.sequences),
        steps=1,
        model=Pretrained(str(model)),
        data=PromptFile(train="random prompts", answer_key=None),
        rewards=Rewards(parts=(FunctionReward("scripts.benchmarks.workload:even_share"),)),
        rollout=Rollout(
            prompts_per_step=max(1, flags.sequences // 2),
            responses_per_prompt=2,
            max_prompt_tokens=flags.tokens - flags.trained,
            max_response_tokens=flags.trained,
        ),
        actor=Training(
            optimizer=Optimizer(learning_rate=1e-6, weight_decay=0.0),
            tokens_per_microbatch=flags.microbatch,
            remat=flags.remat,
        ),
        evaluation=Evaluation(every_steps=0),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
    )


def flops_of(flags: argparse.Namespace) -> float:
    """Return the FLOPs of one forward pass: weights, causal attention, and the head on trained tokens."""
    model, tokens = SIZES[flags.size], flags.sequences * flags.tokens
    layers = model.num_layers * layer_flops(model, tokens=tokens, context=flags.tokens / 2)
    return layers + head_flops(model, "lm", tokens=flags.sequences * flags.trained)


def measure(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a forward pass and an update over random sequences."""
    model = SIZES[flags.size]
    models.save_params(random_params(model, jax.numpy.bfloat16), model, folder, dtype=jax.numpy.bfloat16)
    config = config_of(folder, flags)
    shape = flags.sequences, flags.tokens, flags.trained, model.vocab_size
    sequences = update.sequences_of(*shape, responses=1)
    dice, both = np.random.default_rng(1), sequences.token_BT.shape
    fields: dict[str, Any] = {name: dice.normal(-9, 0.1, both).astype(np.float32) for name in ("old_logp", "ref_logp")}
    fields |= {"advantage": dice.normal(size=both).astype(np.float32), "kl_weight": np.full(both, 1e-5, np.float32)}
    weight_BT = np.where(sequences.mask_BT, 1 / sequences.mask_BT.sum(), 0).astype(np.float32)
    experience = [Experience.of(sequences, weight_BT, fields)]
    start = time.perf_counter()
    pools = launch(config, embedded_tokenizer(), progress=lambda *_: None, workdir=None)
    roles = pools.roles(Phase(config, ("actor",), 100))
    load_s = time.perf_counter() - start
    rollout = RolloutBatch(sequences, np.zeros(both, np.float32), np.zeros(both[0], bool), np.zeros(both, np.int32))

    def timed(call: Any) -> tuple[float, float]:
        times = []
        for _ in range(1 + flags.repeats):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return times[0], median(times[1:])

    first_forward_s, forward_s = timed(lambda: roles.actor.compute_log_prob(rollout).result())
    how: dict[str, Any] = {"objective": policy_objective, "settings": config.algorithm}
    first_update_s, update_s = timed(lambda: roles.actor.update_actor(experience, **how).result())
    memory = jax.devices()[0].memory_stats() or {}
    roles.close()
    pools.close()
    flops, tokens = flops_of(flags), flags.sequences * flags.tokens
    return {
        "load_s": round(load_s, 1),
        "first_forward_s": round(first_forward_s, 1),
        "first_update_s": round(first_update_s, 1),
        "forward_s": round(forward_s, 4),
        "update_s": round(update_s, 4),
        "update_tokens_per_s": round(tokens / update_s),
        "forward_mfu": round(flops / forward_s / flags.peak, 3),
        "update_mfu": round(3 * flops / update_s / flags.peak, 3),
        "peak_gb": round(memory.get("peak_bytes_in_use", 0) / 1e9, 2),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--trained", type=int, default=384, help="trained tokens, at the end of a sequence")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens")
    parser.add_argument("--remat", choices=get_args(Remat), default="auto", help="as Training.remat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peak", type=float, default=989e12, help="operations a second of the card, in bfloat16")
    flags = parser.parse_args()
    sizes = {name: getattr(flags, name) for name in ("size", "sequences", "tokens", "microbatch", "remat")}
    with tempfile.TemporaryDirectory() as folder:
        try:
            say("update", **sizes, **measure(flags, Path(folder) / "model"))
        except Exception as error:  # a size that does not fit is a result too
            say("update", **sizes, refused=refused(error))


if __name__ == "__main__":
    main()
