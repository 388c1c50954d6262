"""GSPO of the MoE model Qwen3-30B-A3B on DAPO-Math-17k, on 16 machines of eight H100; needs `jaxrlhf[ray]`.

    python -m jaxrlhf.train --config gspo_moe_30b.py --cluster.address auto

GSPO has one ratio for each response. If sampler and trainer choose different experts for a token, this ratio changes
less than the ratio of that token. There is no KL. `--algorithm GRPO --rollout.replay-routing` is an alternative: it
trains each token through the experts with which the token was sampled.

Planned: Qwen3-30B-A3B on h100x16x8 51 of 75 GiB of a device, 112 s a step, 9.3 h.

Source: Zheng et al. 2025 (GSPO, arXiv:2507.18071); settings of verl's example (https://github.com/volcengine/verl,
examples/gspo_trainer/test_gspo_qwen30b_a3b_ep.sh), without its punishment of long responses.
"""

from dataclasses import replace

from jaxrlhf.config import GSPO, Config, Pretrained, RayCluster, load

RESPONSES_PER_PROMPT = 16


def get_config() -> Config:
    """Return the configuration of the run; data, reward and evaluation are those of `dapo_math_7b.py`."""
    dense = load("dapo_math_7b")
    return replace(
        dense,
        name="gspo_moe_30b",
        model=Pretrained("Qwen/Qwen3-30B-A3B"),
        algorithm=GSPO(responses_per_update=32 * RESPONSES_PER_PROMPT),
        rollout=replace(dense.rollout, prompts_per_step=256, responses_per_prompt=RESPONSES_PER_PROMPT),
        actor=replace(dense.actor, tokens_per_microbatch=16 * 10_240),
        cluster=RayCluster(devices_per_host=8),
        hardware="h100x16",
        steps=300,
    )
