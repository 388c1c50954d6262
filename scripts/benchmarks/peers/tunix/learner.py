"""Common parts of the scripts of Tunix's learners: models on one device, the cluster, clocks on its phases."""

from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from flax import nnx
from tunix.rl.rl_cluster import ClusterConfig, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from scripts.benchmarks.peers import phases
from scripts.benchmarks.peers.phases import PREPARE, UPDATE
from scripts.benchmarks.peers.tunix import model as tunix_model

FLAGS = phases.parse("Steps of a Tunix learner on a workload.", workload="fixed")
logging.set_verbosity(logging.ERROR)
TASK = phases.Task(FLAGS)
WORKLOAD = TASK.workload
CLOCK = phases.Phases(warmup=FLAGS.warmup, counted=FLAGS.steps)
PACKAGES = ("google-tunix", "jax", "flax", "optax", "transformers")


def load() -> Any:
    """Return the workload's model, without rematerialization."""
    return tunix_model.load(TASK.model)


def cluster_config(*, micro_prompts: int, critic: bool) -> ClusterConfig:
    """Return the cluster of all roles on one device, with one update a step; Tunix's batch sizes count prompts."""

    def optimizer() -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(phases.LEARNING_RATE, weight_decay=0.0))

    end = TASK.tokenizer().eos_token_id
    roles = [Role.ACTOR, Role.REFERENCE, Role.ROLLOUT, *([Role.CRITIC] if critic else [])]
    return ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, tunix_model.MESH),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=RLTrainingConfig(
            actor_optimizer=optimizer(),
            critic_optimizer=optimizer() if critic else None,
            eval_every_n_steps=10**9,
            max_steps=10**9,
            mini_batch_size=WORKLOAD.prompts,
            train_micro_batch_size=micro_prompts,
            rollout_micro_batch_size=WORKLOAD.prompts,
            compute_logps_micro_batch_size=micro_prompts,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=WORKLOAD.new_tokens,
            max_prompt_length=WORKLOAD.prompt_tokens,
            kv_cache_size=WORKLOAD.prompt_tokens + WORKLOAD.new_tokens,  # the smallest possible
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=[end],
        ),
    )


def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each response."""
    return [TASK.reward(text) for text in completions]


def train(learner: Any) -> None:
    """Run the steps; the clock of a phase stops when its arrays are computed."""
    cluster = learner.rl_cluster

    def generated(result: Any) -> None:
        CLOCK.generated(TASK, [len(tokens) for tokens in result.tokens])

    def trained(trainer: str) -> Any:
        return lambda _: jax.block_until_ready(nnx.state(getattr(cluster, trainer).model))

    CLOCK.watch(cluster.rollout, "generate", "generate", after=generated)
    CLOCK.watch(cluster, "get_ref_per_token_logps", PREPARE, after=jax.block_until_ready)
    CLOCK.watch(cluster, "get_old_per_token_logps", PREPARE, after=jax.block_until_ready)
    CLOCK.watch(cluster, "update_actor", UPDATE, after=trained("actor_trainer"))
    if hasattr(cluster, "_critic_trainer"):
        CLOCK.watch(cluster, "get_values", PREPARE, after=jax.block_until_ready)
        CLOCK.watch(cluster, "update_critic", UPDATE, after=trained("critic_trainer"))
    run = learner._run_global_step

    def run_and_end(*args: Any, **named: Any) -> None:
        if not CLOCK.steps:
            CLOCK.begin()
        run(*args, **named)
        CLOCK.end_step()

    learner._run_global_step = run_and_end
    texts = np.array(TASK.texts(steps=CLOCK.total))
    learner.train({"prompts": batch} for batch in texts.reshape(CLOCK.total, WORKLOAD.prompts))
    if not CLOCK.finished:
        raise RuntimeError(f"the learner stopped after {len(CLOCK.steps)} of {CLOCK.total} steps")
