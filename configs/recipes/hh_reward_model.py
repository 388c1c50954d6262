"""Helpfulness, stage 1 of 2: a reward model from the preference pairs of hh-rlhf, on a machine of eight H100.

    python -m jaxrlhf.train --config hh_reward_model.py --export models/hh_reward_model

The run has one epoch of the 43835 pairs of the part `helpful-base`. The next stage is `hh_ppo.py`.

Planned: Qwen2.5-7B-Instruct on h100x1x8 40 of 75 GiB of a device, 6.8 s a step, 0.3 h.

Source: batch and learning rates of OpenRLHF's example (https://github.com/OpenRLHF/OpenRLHF; Hu et al. 2024,
arXiv:2405.11143); the pairs are Bai et al. 2022 (arXiv:2204.05862).
"""

from jaxrlhf.config import Config, Evaluation, HubPairs, Optimizer, Pretrained, RewardModel, Rollout, Training

PAIRS, PAIRS_PER_UPDATE = 43_835, 256


def get_config() -> Config:
    """Return the configuration of the run; `rollout` limits the lengths of prompts and answers."""
    return Config(
        name="hh_reward_model",
        model=Pretrained("Qwen/Qwen2.5-7B-Instruct"),
        data=HubPairs("trl-lib/hh-rlhf-helpful-base", evaluation="test"),
        algorithm=RewardModel(
            pairs_per_update=PAIRS_PER_UPDATE,
            critic=Training(
                optimizer=Optimizer(learning_rate=9e-6, warmup_updates=5, decay="cosine", weight_decay=0.0),
                tokens_per_microbatch=65_536,
            ),
        ),
        rollout=Rollout(max_prompt_tokens=1024, max_response_tokens=1024),
        placement="auto",
        steps=PAIRS // PAIRS_PER_UPDATE,
        evaluation=Evaluation(every_steps=50, problems=1024),
    )
