"""Pools, offload and layouts that cannot work are refused with the reason."""

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
    checked,
    offloaded,
)

ALL = ("actor", "critic", "reference", "reward")


def a_config(**changes) -> Config:
    algorithm = PPO(kl=KLInReward())
    settings = {"name": "test", "model": FromScratch(), "data": Arithmetic(), "algorithm": algorithm, "steps": 10}
    return checked(Config(**{**settings, **changes}))


def pools(*roles: tuple[str, ...]) -> tuple[Pool, ...]:
    return tuple(Pool(f"p{index}", 1, names) for index, names in enumerate(roles))


def test_a_placement_that_cannot_work_is_refused(refused):
    for changes in [
        {"pools": pools(ALL), "devices": 1},
        {"pools": pools(("actor", "critic"))},
        {"pools": pools(ALL, ("critic",))},
        {"pools": pools((*ALL, "cost"))},
        {"pools": (Pool("a", 1, ALL[:2]), Pool("a", 1, ALL[2:]))},
        {"pools": pools((*ALL, "rollout"))},
        {"offload": ("judge",)},
        {"offload": ("reward",)},
        {"offload": ("rollout",)},
        {"offload": ("actor.cache",)},
        {"offload": ("actor.",)},
        {"offload": ("reference.optimizer",)},
        {"algorithm": PPO(critic=Training(layout=Layout(tensor=2, generation_tensor=2)))},
        {"reference_layout": Layout(stage=2, generation_stage=2)},
        {"rewards": Rewards((ModelReward("judge", layout=Layout(tensor=2, generation_tensor=2)),))},
        {"algorithm": SFT(), "reference_layout": Layout(fsdp=2)},
        {"algorithm": PPO(), "reference_layout": Layout(fsdp=2)},
        {"algorithm": PPO(), "pools": pools(ALL)},
        {"hardware": "a100x1x8"},
        {"placement": "auto", "pools": pools(ALL), "offload": ("actor",)},
        {"placement": "auto", "reference_layout": Layout(), "actor": Training(layout=Layout(tensor=2))},
        {"placement": "auto", "algorithm": PPO(critic=Training(layout=Layout(fsdp=2)))},
        {"placement": "auto", "rewards": Rewards((ModelReward("judge", layout=Layout(tensor=2)),))},
        {"seed": 2**32},
    ]:
        with refused():
            a_config(**changes)


def test_settings_refuse_what_they_cannot_mean(refused):
    for build in [
        lambda: Pool("a", 0, ALL),
        lambda: Pool("a", 1, ()),
        lambda: Pool("a/b", 1, ALL),
        lambda: RayCluster(devices_per_host=0),
        lambda: RayCluster(address="ray://head"),
        lambda: RayCluster(restarts=-1),
    ]:
        with refused():
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
