"""Learning rates come to their end where their role's last update is."""

from dataclasses import replace

import pytest
from built_workers import build
from tiny_runs import get_config

from jaxrlhf.config import Optimizer


@pytest.mark.parametrize("resting", [0, 2])
def test_a_policy_that_rests_at_first_still_decays_to_nothing(resting):
    config, linear = get_config(), Optimizer(learning_rate=1e-3, decay="linear")
    algorithm = config.algorithm
    critic = replace(algorithm.critic, optimizer=linear)
    config = replace(
        config,
        steps=5,
        devices=1,
        cold_start=None,
        actor=replace(config.actor, optimizer=linear),
        algorithm=replace(algorithm, critic=critic, critic_warmup_steps=resting),
    )
    each = config.algorithm.updates_per_step(config.rollout)
    builder, workers = build(config, "actor", "critic", updates=5 * each)
    for role, steps in (("actor", 5 - resting), ("critic", 5)):
        rates = [float(workers[role]._schedule(update)) for update in range(steps * each + 1)]
        assert rates == pytest.approx([1e-3 * (1 - update / (steps * each)) for update in range(steps * each + 1)])
    builder.close()
