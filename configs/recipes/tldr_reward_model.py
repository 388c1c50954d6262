"""Summaries of posts, stage 2 of 3: a reward model from comparisons of two summaries, on one H100.

    python -m jaxrlhf.train --config tldr_reward_model.py --export models/tldr_reward_model

The run has one epoch of 92858 comparisons, from the policy of `tldr_sft.py`. The next stage is `tldr_ppo.py`.

Planned: Qwen2.5-1.5B on h100x1x1 38 of 75 GiB of a device, 1.2 s a step, 0.5 h.

Source: Huang et al. 2024 (arXiv:2403.17031) for batch and learning rate, there with Pythia; the comparisons are
Stiennon et al. 2020 (arXiv:2009.01325).
"""

from jaxrlhf.config import Config, Evaluation, HubPairs, Optimizer, Pretrained, RewardModel, Rollout, Training

PAIRS, PAIRS_PER_UPDATE = 92_858, 64


def get_config() -> Config:
    """Return the configuration of the run; `rollout` limits the lengths of posts and summaries."""
    return Config(
        name="tldr_reward_model",
        model=Pretrained("models/tldr_sft"),
        data=HubPairs("trl-lib/tldr-preference", evaluation="validation"),
        algorithm=RewardModel(
            pairs_per_update=PAIRS_PER_UPDATE,
            critic=Training(
                optimizer=Optimizer(learning_rate=3e-6, decay="cosine", weight_decay=0.0), tokens_per_microbatch=32_768
            ),
        ),
        rollout=Rollout(max_prompt_tokens=640, max_response_tokens=128),
        placement="auto",
        steps=PAIRS // PAIRS_PER_UPDATE,
        evaluation=Evaluation(every_steps=200, problems=2048),
    )
