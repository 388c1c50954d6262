"""Classic RLHF pipeline, stage 2 of 3: a reward model from preference pairs.

    python -m jaxrlhf.train --config rlhf_reward_model.py --export models/rlhf_reward_model

The reward model starts from the policy of `rlhf_sft.py`. Rejected solutions stop one step early or have a mistake in
one step. The next stage is `rlhf_ppo.py`.

Source: Ouyang et al. 2022 (arXiv:2203.02155), step 2.
"""

from jaxrlhf.config import (
    ArithmeticPairs,
    Checkpointing,
    Config,
    Evaluation,
    Optimizer,
    Pretrained,
    RewardModel,
    Rollout,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run; `rollout` limits the lengths of prompts and answers."""
    return Config(
        name="rlhf_reward_model",
        model=Pretrained("models/rlhf_sft"),
        data=ArithmeticPairs(difficulty=2, train_problems=12_800),
        algorithm=RewardModel(
            pairs_per_update=64,
            critic=Training(
                optimizer=Optimizer(learning_rate=1e-3, warmup_updates=10, decay="linear", weight_decay=0.0),
                tokens_per_microbatch=4096,
            ),
        ),
        rollout=Rollout(max_prompt_tokens=64, max_response_tokens=32),
        steps=100,
        evaluation=Evaluation(every_steps=50),
        checkpoint=Checkpointing(every_steps=0),
    )
