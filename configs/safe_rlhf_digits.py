"""Safe RLHF on a minimal task, from random weights: less than a minute on a laptop CPU.

    python -m jaxrlhf.train --config safe_rlhf_digits.py

A response that begins with a digit has reward 1. A response that begins with a letter has reward 1.5 and cost 1. PPO
without the cost would learn letters. The multiplier of the cost grows while more than a tenth of the responses begin
with a letter, so the policy finds the digits, of which there are far fewer. Nothing is downloaded.

Result: after 40 steps all held-out responses begin with a letter or digit; in the last step, none with a letter.

Source: Dai et al. 2023 (arXiv:2310.12773).
"""

from jaxrlhf.config import (
    Arithmetic,
    Checkpointing,
    Config,
    Constraint,
    Evaluation,
    FormatReward,
    FromScratch,
    Optimizer,
    Rewards,
    Rollout,
    SafeRLHF,
    Training,
)

LETTER = r"(?s)[A-Za-z].*"


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="safe_rlhf_digits",
        model=FromScratch(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8),
        data=Arithmetic(difficulty=1, train_problems=200, eval_problems=16),
        rewards=Rewards(
            parts=(
                FormatReward(pattern=r"(?s)[A-Za-z0-9].*", weight=1.0),
                FormatReward(pattern=LETTER, weight=0.5),
                FormatReward(pattern=LETTER, weight=0.0),
            )
        ),
        algorithm=SafeRLHF(
            lam=0.95,
            responses_per_update=64,
            kl=None,
            constraint=Constraint(part=2, limit=0.1, multiplier=1.5, learning_rate=0.5),
            critic=small_model_training(),
            cost_critic=small_model_training(),
        ),
        rollout=Rollout(prompts_per_step=16, responses_per_prompt=4, max_prompt_tokens=64, max_response_tokens=4),
        actor=small_model_training(),
        steps=40,
        evaluation=Evaluation(every_steps=0, problems=16),
        checkpoint=Checkpointing(every_steps=0),
    )


def small_model_training() -> Training:
    """Return training settings of a small model, which has memory to spare, so that nothing is recomputed."""
    return Training(Optimizer(learning_rate=1e-2, weight_decay=0.0), tokens_per_microbatch=8192, remat="none")
