"""Plans made by hand, whose reports are easy to compute."""

from jaxrlhf.config import (
    PPO,
    Arithmetic,
    Config,
    FromScratch,
    KLInReward,
    Layout,
    ModelReward,
    Rewards,
    Rollout,
    Training,
)
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Cost, PlacementPlan, PlannedCall, PlannedPool, SearchResult


def a_config(**changes) -> Config:
    """Return PPO with a reward model, with updates, lengths and budgets that are easy to count."""
    settings = {
        "name": "made",
        "algorithm": PPO(
            responses_per_update=32,
            epochs_per_step=2,
            kl=KLInReward(),
            critic=Training(tokens_per_microbatch=8192),
        ),
        "steps": 3,
        "model": FromScratch(),
        "data": Arithmetic(),
        "rewards": Rewards((ModelReward("Qwen/Qwen2.5-0.5B"),)),
        "rollout": Rollout(prompts_per_step=32, responses_per_prompt=4, max_prompt_tokens=100, max_response_tokens=300),
    }
    return Config(**{**settings, **changes})


def machines(**changes) -> Hardware:
    """Return two machines of four devices with arbitrary rates."""
    rates = dict.fromkeys(
        (
            *("memory_bytes", "matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"),
            *("host_bytes_per_s", "link_latency_s", "network_latency_s", "layer_overhead_s", "dispatch_overhead_s"),
        ),
        1e9,
    )
    return Hardware(**{"name": "made", "machines": 2, "devices_per_machine": 4, **rates, **changes})


def split() -> PlacementPlan:
    """Return a plan with actor and reference on four devices, critic and reward on two: 10 + 3 + 8 seconds."""
    policy = {"actor": Layout(2, 1, 1, 2, 1, 1), "reference": Layout(1, 4)}
    judging = {"critic": Layout(2), "reward": Layout(1, 1, 1, 2)}
    return PlacementPlan(
        pools=(
            PlannedPool(("actor", "reference"), 4, policy, 3 * 2.0**30, "actor update"),
            PlannedPool(("critic", "reward"), 2, judging, 2.0**29, "critic update"),
        ),
        offload=("actor.optimizer", "reward"),
        calls=(
            PlannedCall("generate", 0, "actor", "switch", Cost(collective_s=1.0)),
            PlannedCall("generate", 0, "actor", "generate", Cost(compute_s=2.0, memory_s=7.0), "1 wave"),
            PlannedCall("prepare", 0, "actor", "infer", Cost(compute_s=1.0)),
            PlannedCall("prepare", 0, "reference", "infer", Cost(compute_s=1.5, collective_s=0.5)),
            PlannedCall("prepare", 1, "critic", "infer", Cost(compute_s=1.25)),
            PlannedCall("prepare", 1, "reward", "infer", Cost(compute_s=0.25)),
            PlannedCall("update", 0, "actor", "update", Cost(compute_s=5.0, idle_s=0.5)),
            PlannedCall("update", 0, "actor", "offload", Cost(host_s=0.5)),
            PlannedCall("update", 1, "critic", "update", Cost(compute_s=8.0)),
        ),
        stage_seconds={"generate": 10.0, "prepare": 3.0, "update": 8.0},
        slots=64,
    )


def together() -> PlacementPlan:
    """Return a plan with all roles on eight devices: 6 + 4.5 + 15.5 seconds, 5 of them for collectives."""
    roles = ("actor", "critic", "reference", "reward")
    return PlacementPlan(
        pools=(PlannedPool(roles, 8, dict.fromkeys(roles, Layout(8)), 2.0**32, "actor generate"),),
        offload=(),
        calls=(
            PlannedCall("generate", 0, "actor", "generate", Cost(compute_s=1.0, memory_s=5.0)),
            PlannedCall("prepare", 0, "actor", "infer", Cost(compute_s=1.5)),
            PlannedCall("prepare", 0, "critic", "infer", Cost(compute_s=1.0)),
            PlannedCall("prepare", 0, "reference", "infer", Cost(compute_s=1.5)),
            PlannedCall("prepare", 0, "reward", "infer", Cost(compute_s=0.5)),
            PlannedCall("update", 0, "actor", "update", Cost(compute_s=6.0, collective_s=2.0)),
            PlannedCall("update", 0, "critic", "update", Cost(compute_s=4.5, collective_s=3.0)),
        ),
        stage_seconds={"generate": 6.0, "prepare": 4.5, "update": 15.5},
        slots=128,
    )


def a_search() -> SearchResult:
    """Return the search result with both plans, the split plan first."""
    return SearchResult((split(), together()), placements=15, allocations=40, simulated=300, seconds=0.125)
