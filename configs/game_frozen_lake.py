"""GiGPO on a game of gymnasium, from random weights: cross the frozen lake.

    pip install 'jaxrlhf[environments]' && python -m jaxrlhf.train --config game_frozen_lake.py

The policy sees its cell, and answers L, D, R or U. In the demonstrations, seven of ten steps go right or down, towards
the goal, and ignore the holes. The shortest way has six steps. GiGPO compares steps that were made from the same cell.
All other settings are those of `game_treasure.py`.

Result: 7, 4 and 3 % of the sampled games cross the lake in the first training step, 100, 91 and 98 % in step 12 (seeds
0, 1 and 2).

Source: Feng et al. 2025 (GiGPO, arXiv:2505.10978).
"""

from dataclasses import replace

from jaxrlhf.config import Config, Environment, Generated, load


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(
        load("game_treasure"),
        name="game_frozen_lake",
        data=Generated("jaxrlhf.data.generated:lake_walks", train_problems=12_800),
        environment=Environment(factory="jaxrlhf.environments.games:lake", max_turns=12, turn_tokens=3),
    )
