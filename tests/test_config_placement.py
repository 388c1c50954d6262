"""Pools, offload and layouts that cannot work are refused with the reason."""

import re

import pytest

from jaxrlhf.config import (
    GRPO,
    PPO,
    SFT,
    Arithmetic,
    Config,
    FromScratch,
    KLInReward,
    Layout,
    ModelReward,
    Pool,
    RayCluster,
    Rewards,
    Rollout,
    Training,
    offloaded,
)

ALL = ("actor", "critic", "reference", "reward")


def a_config(**changes) -> Config:
    algorithm = PPO(kl=KLInReward())
    settings = {"name": "test", "model": FromScratch(), "data": Arithmetic(), "algorithm": algorithm, "steps": 10}
    return Config(**{**settings, **changes})


def pools(*roles: tuple[str, ...]) -> tuple[Pool, ...]:
    return tuple(Pool(f"p{index}", 1, names) for index, names in enumerate(roles))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": pools(ALL), "devices": 1}, "devices=1 and pools are both given"),
        ({"pools": pools(("actor", "critic"))}, "pools do not place reference; add"),
        ({"pools": pools(ALL, ("critic",))}, "pools place critic more than once"),
        ({"pools": pools((*ALL, "cost"))}, "pools place cost, and the algorithm has actor, critic, reference, reward"),
        ({"pools": (Pool("a", 1, ALL[:2]), Pool("a", 1, ALL[2:]))}, "two of the pools ['a', 'a'] have one name"),
        ({"pools": pools((*ALL, "rollout"))}, "pool p0 places actor and rollout"),
        ({"offload": ("judge",)}, "offload: 'judge' names no model of this run; it has actor, critic, reference"),
        ({"offload": ("reward",)}, "offload: 'reward' names no model of this run; it has actor, critic, reference"),
        ({"offload": ("rollout",)}, "offload: 'rollout' names no model of this run"),
        ({"offload": ("actor.cache",)}, "offload: 'actor.cache' names no part of actor; write actor, actor.parame"),
        ({"offload": ("actor.",)}, "offload: 'actor.' names no part of actor"),
        ({"offload": ("reference.optimizer",)}, "offload: 'reference.optimizer', and reference is not trained"),
        (
            {"algorithm": PPO(critic=Training(layout=Layout(tensor=2, generation_tensor=2)))},
            "critic generates nothing, so its layout has no use for generation_stage=1 and generation_tensor=2",
        ),
        ({"reference_layout": Layout(stage=2, generation_stage=2)}, "reference_layout generates nothing"),
        (
            {"rewards": Rewards((ModelReward("judge", layout=Layout(tensor=2, generation_tensor=2)),))},
            "reward judge generates nothing",
        ),
        ({"algorithm": SFT(), "reference_layout": Layout(fsdp=2)}, "reference_layout is given, and SFT has no"),
        (
            {"algorithm": PPO(), "reference_layout": Layout(fsdp=2)},
            "reference_layout is given, and PPO with kl=None has no reference; drop it",
        ),
        (
            {"algorithm": PPO(), "pools": pools(ALL)},
            "pools place reference, and the algorithm has actor, critic, reward; it has a reference where it has a kl",
        ),
        (
            {"hardware": "a100x1x8"},
            "hardware='a100x1x8' is read by placement='auto' alone; drop it, or set placement='a",
        ),
        (
            {"placement": "auto", "pools": pools(ALL), "offload": ("actor",)},
            "placement='auto' chooses pools, layouts and offload, and the configuration gives pools, offload; drop",
        ),
        (
            {"placement": "auto", "reference_layout": Layout(), "actor": Training(layout=Layout(tensor=2))},
            "placement='auto' chooses pools, layouts and offload, and the configuration gives layout of actor, refer",
        ),
        (
            {"placement": "auto", "algorithm": PPO(critic=Training(layout=Layout(fsdp=2)))},
            "placement='auto' chooses pools, layouts and offload, and the configuration gives layout of critic; drop",
        ),
        (
            {"placement": "auto", "rewards": Rewards((ModelReward("judge", layout=Layout(tensor=2)),))},
            "placement='auto' chooses pools, layouts and offload, and the configuration gives layout of reward judge;",
        ),
        ({"seed": 2**32}, "Config.seed must be below 2**32, got 4294967296"),
    ],
)
def test_a_placement_that_cannot_work_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        a_config(**changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Pool("a", 0, ALL), "Pool.devices must be above 0, got 0"),
        (lambda: Pool("a", 1, ()), "pool 'a' has no roles"),
        (lambda: Pool("a/b", 1, ALL), "Pool.name must be a plain name, got 'a/b'"),
        (lambda: RayCluster(devices_per_host=0), "RayCluster.devices_per_host must be above 0, got 0"),
        (lambda: RayCluster(address="ray://head"), "RayCluster.address must be 'auto' or host:port"),
        (lambda: RayCluster(restarts=-1), "RayCluster.restarts must be 0 or more, got -1"),
    ],
)
def test_settings_refuse_what_they_cannot_mean(build, message) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        build()


def test_what_works() -> None:
    a_config(pools=pools(("actor", "reference"), ("critic", "reward")))
    a_config(pools=pools(("actor", "reference", "critic"), ("rollout",)))  # rewards of functions find their own place
    a_config(offload=("actor.optimizer", "critic", "reference.parameters"))
    a_config(rewards=Rewards((ModelReward("judge"),)), offload=("reward",))
    a_config(placement="auto", devices=4)
    a_config(placement="auto", hardware="a100x16x8", cluster=RayCluster())
    a_config(
        algorithm=GRPO(kl=KLInReward()),
        rollout=Rollout(responses_per_prompt=4),
        pools=pools(("actor",), ("reference",)),
    )


def test_a_role_or_a_part_of_it_waits() -> None:
    chosen = ("actor.optimizer", "critic")
    assert offloaded(chosen, "actor", "optimizer")
    assert not offloaded(chosen, "actor", "parameters")
    assert offloaded(chosen, "critic", "parameters")
    assert not offloaded(chosen, "reference", "parameters")
