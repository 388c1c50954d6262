"""Launch of a run's pools from its configuration."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import jax
from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Config, Pool, Refusal
from jaxrlhf.runtime import compilation_cache
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.single_controller.host import Host
from jaxrlhf.single_controller.pools import REWARD_OUTPUT, LocalRanks, Pools, Ranks, placed
from jaxrlhf.workers.build import Builder
from jaxrlhf.workers.model import Progress
from jaxrlhf.workers.sampler import CompletionFeed


def launch(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    progress: Progress,
    workdir: Path | None,
    devices: Sequence[jax.Device] | None = None,
) -> Pools:
    """Launch the pools of a run: in this process, or on the hosts of a cluster.

    Args:
      devices: Devices for pools of this process, even if a cluster is configured; None is all devices or the cluster.
      workdir: Folder for the printed output of hosts and reward functions; None is a dry run, which writes nothing.

    Raises:
      Refusal: Settings do not fit the devices or each other.
      HostFailure: A host of the cluster did not start.
    """
    if devices is None:
        compilation_cache.turn_on()
    if config.cluster is not None and devices is None:
        from jaxrlhf.single_controller.ray_backend import launch_on_ray

        return launch_on_ray(config, config.cluster, progress=progress, workdir=workdir)
    if jax.process_count() > 1:
        raise Refusal(
            f"this is one of {jax.process_count()} processes of jax.distributed; start one process, which launches "
            "the hosts (cluster=RayCluster(...), or --cluster ray)"
        )
    output = None if workdir is None else workdir / REWARD_OUTPUT
    ranks: list[Ranks] = []
    feed = CompletionFeed()
    try:
        for pool, pool_devices in split_devices(config, devices or jax.devices()):
            builder = Builder(
                config,
                tokenizer,
                ResourcePool(pool.name, tuple(pool_devices)),
                pool.roles,
                progress=progress,
                reward_output=output,
                feed=feed,
            )
            ranks.append(LocalRanks(Host(builder)))
    except BaseException:
        Pools(ranks).close()
        raise
    return Pools(ranks)


def _check_threads(devices: Sequence[jax.Device]) -> None:
    """Raise `Refusal` if the collectives of CPU devices could deadlock for lack of threads."""
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if len(devices) > 1 and devices[0].platform == "cpu" and threads < 2 * len(devices):
        raise Refusal(
            f"{len(devices)} CPU devices need more than XLA's {threads} threads, or their collectives may deadlock; "
            f"before Python starts, set JAX_NUM_CPU_DEVICES={len(devices)} or NPROC=32 in the environment"
        )


def split_devices(config: Config, devices: Sequence[jax.Device]) -> list[tuple[Pool, Sequence[jax.Device]]]:
    """Assign devices to pools, in order.

    Raises:
      Refusal: There are fewer devices than the pools need.
    """
    pools = placed(config, devices=len(devices))
    wanted = sum(pool.devices for pool in pools)
    if wanted > len(devices):
        requested = f"devices={wanted}" if not config.pools else f"pools of {[pool.devices for pool in pools]} devices"
        raise Refusal(
            f"{requested} exceeds the {len(devices)} {devices[0].platform} devices that JAX reports; lower the number, "
            f"or on CPU start with JAX_NUM_CPU_DEVICES={wanted}"
        )
    if any(pool.devices > 1 for pool in pools):  # otherwise there are no collectives
        _check_threads(devices[:wanted])
    ends = itertools.accumulate(pool.devices for pool in pools)
    return [(pool, devices[end - pool.devices : end]) for pool, end in zip(pools, ends, strict=True)]
