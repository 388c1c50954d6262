"""DAPO on DAPO-Math-17k from Qwen2.5-32B, on 16 machines of eight H100 or a v5p-128 slice; needs `jaxrlhf[ray]`.

    python -m jaxrlhf.train --config dapo_math_32b.py --cluster.address auto --cluster.devices-per-host 8

The run of `dapo_math_7b.py` at the paper's size and lengths: responses have up to 20k tokens, and a penalty grows over
the last 4k tokens. The setting `hardware` describes the cluster, here `h100x16`; on a v5p-128 slice, set
`--hardware v5p-128 --cluster.devices-per-host 4`.

Planned: Qwen2.5-32B on h100x16x8 52 of 75 GiB of a device, 2,005 s a step, 111.4 h; Qwen2.5-32B on v5p-128 83 of 95 GiB
of a device, 2,882 s a step, 160.1 h.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 4.1; verl's recipe of it (https://github.com/volcengine/verl,
recipe/dapo/run_dapo_qwen2.5_32b.sh).
"""

from dataclasses import replace

from jaxrlhf.config import DAPO, Config, OverlongPunishment, Pretrained, RayCluster, load


def get_config() -> Config:
    """Return the configuration of the run."""
    small = load("dapo_math_7b")
    assert isinstance(small.algorithm, DAPO)
    return replace(
        small,
        name="dapo_math_32b",
        model=Pretrained("Qwen/Qwen2.5-32B"),
        algorithm=replace(small.algorithm, overlong=OverlongPunishment(buffer_share=0.2)),
        rollout=replace(small.rollout, max_response_tokens=20_480),
        actor=replace(small.actor, tokens_per_microbatch=16 * 22_528),
        cluster=RayCluster(devices_per_host=8),
        hardware="h100x16",
    )
