"""Classic RLHF pipeline, stage 1 of 3: supervised fine-tuning on demonstrations, many of them careless.

    python -m jaxrlhf.train --config rlhf_sft.py --export models/rlhf_sft

More than half of the demonstrations stop one step early, and the policy learns to do so, too. The next stages are
`rlhf_reward_model.py` and `rlhf_ppo.py`. Nothing is downloaded.

Source: Ouyang et al. 2022 (arXiv:2203.02155), step 1.
"""

from jaxrlhf.config import (
    SFT,
    Arithmetic,
    ArithmeticReward,
    Checkpointing,
    Config,
    Evaluation,
    FromScratch,
    Optimizer,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run; `rewards` and `rollout` are for its evaluation."""
    return Config(
        name="rlhf_sft",
        model=FromScratch(hidden_size=96, intermediate_size=288, num_layers=2, head_dim=24),
        data=Arithmetic(difficulty=2, train_problems=12_800, unfinished_share=0.62),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        algorithm=SFT(examples_per_update=64),
        rollout=Rollout(max_prompt_tokens=64, max_response_tokens=32),
        actor=Training(
            optimizer=Optimizer(learning_rate=2e-3, warmup_updates=10, weight_decay=0.0),
            tokens_per_microbatch=4096,
        ),
        steps=150,
        evaluation=Evaluation(every_steps=0),
        checkpoint=Checkpointing(every_steps=0),
    )
