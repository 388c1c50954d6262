"""Summaries of posts, stage 1 of 3: supervised fine-tuning on the TL;DR that people wrote, on one H100.

    python -m jaxrlhf.train --config tldr_sft.py --export models/tldr_sft

The run has one epoch of 116722 posts, from Qwen2.5-1.5B. Its evaluation measures the share of summaries that are one
paragraph of at most 300 characters. The next stages are `tldr_reward_model.py` and `tldr_ppo.py`.

Planned: Qwen2.5-1.5B on h100x1x1 34 of 75 GiB of a device, 2.2 s a step, 0.6 h.

Source: Huang et al. 2024 (arXiv:2403.17031) for batch, learning rate and lengths, there with Pythia; the posts are
Stiennon et al. 2020 (arXiv:2009.01325).
"""

from jaxrlhf.config import (
    SFT,
    Config,
    Evaluation,
    FormatReward,
    HubData,
    Optimizer,
    Pretrained,
    Rewards,
    Rollout,
    Training,
)

POSTS, EXAMPLES_PER_UPDATE = 116_722, 128


def get_config() -> Config:
    """Return the configuration of the run; `rewards` and `rollout` are for its evaluation."""
    return Config(
        name="tldr_sft",
        model=Pretrained("Qwen/Qwen2.5-1.5B"),
        data=HubData("trl-lib/tldr", answer_key=None, solution_key="completion", evaluation="validation"),
        rewards=Rewards(parts=(FormatReward(pattern=r"\s*\S[^\n]{0,299}\s*", weight=1.0),)),
        algorithm=SFT(examples_per_update=EXAMPLES_PER_UPDATE),
        rollout=Rollout(max_prompt_tokens=640, max_response_tokens=128),
        actor=Training(optimizer=Optimizer(learning_rate=3e-6, decay="cosine"), tokens_per_microbatch=32_768),
        placement="auto",
        steps=POSTS // EXAMPLES_PER_UPDATE,
        evaluation=Evaluation(every_steps=200),
    )
