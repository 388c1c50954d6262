"""PRIME on a task that needs credit for single tokens, from random weights: less than a minute on a laptop CPU.

    python -m jaxrlhf.train --config prime_letters.py

A response of 24 tokens is right if no token contains an `m`; one in sixteen tokens does. Most of the eight responses of
a step are wrong because of one or two tokens. The implicit process reward model learns from right and wrong responses
which tokens are at fault. Nothing is downloaded.

Result: in the first step no response is right. In step 60 all responses are right, and after it all held-out responses.

Source: Cui et al. 2025 (PRIME, arXiv:2502.01456).
"""

from jaxrlhf.config import (
    PRIME,
    Arithmetic,
    Checkpointing,
    Config,
    Evaluation,
    FormatReward,
    FromScratch,
    Optimizer,
    Rewards,
    Rollout,
    Sampling,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="prime_letters",
        model=FromScratch(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8),
        data=Arithmetic(difficulty=1, train_problems=200, eval_problems=16),
        rewards=Rewards(parts=(FormatReward(pattern=r"(?s)[^m]*", weight=1.0),)),
        algorithm=PRIME(
            responses_per_update=8,
            beta=0.5,
            process_weight=3.0,
            gamma=0.0,
            least_accuracy=0.0,
            most_accuracy=1.0,
            max_rounds=1,
            process_reward=small_model_training(),
        ),
        rollout=Rollout(
            prompts_per_step=2,
            responses_per_prompt=4,
            max_prompt_tokens=64,
            max_response_tokens=24,
            sampling=Sampling(ignore_eos=True),
        ),
        actor=small_model_training(),
        steps=60,
        evaluation=Evaluation(every_steps=0, problems=16),
        checkpoint=Checkpointing(every_steps=0),
    )


def small_model_training() -> Training:
    """Return training settings of a small model, which has memory to spare, so that nothing is recomputed."""
    return Training(Optimizer(learning_rate=1e-2, weight_decay=0.0), tokens_per_microbatch=8192, remat="none")
