"""GRPO on questions that only a long text answers, from random weights: short texts first, long ones after.

    python -m jaxrlhf.train --config grpo_haystack.py

A text names one thing of each of six kinds. A question asks which things three people find; each person collects one
kind. A cold start imitates answers to texts of 12 to 256 words; six in ten answers stop after the first thing. GRPO
trains on texts that grow from 512 to 4096 words, and its reward is 1 for the right answer alone. The policy learns to
complete its answers, and to find things in long texts, too. A guess is right once in 64 times. Nothing is downloaded.

Result: of 64 held-out questions about 4096 words, 5 % are answered after 12 steps, 14 % halfway, 66 % at the end.

Source: Shao et al. 2024 (arXiv:2402.03300) for GRPO; Kamradt 2023 for needles in a haystack.
"""

from jaxrlhf.config import (
    GRPO,
    SFT,
    ColdStart,
    Config,
    Evaluation,
    EvaluationSet,
    FromScratch,
    FunctionReward,
    Generated,
    Optimizer,
    Rewards,
    Rollout,
    Selection,
    Training,
)

TASK = "jaxrlhf.data.documents:haystack"
WORDS = 4096
LONGEST_PROMPT = WORDS + 248
"""Tokens of text and question, plus room in a row for a group's responses next to their prompt."""


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="grpo_haystack",
        model=FromScratch(
            hidden_size=64,
            intermediate_size=192,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            rope_theta=1e6,
        ),
        data=Generated(
            TASK, arguments=(f"tokens={WORDS}", "shortest=512", "growing=True"), train_problems=384, eval_problems=64
        ),
        selection=Selection(order="given"),
        rewards=Rewards(parts=(FunctionReward("jaxrlhf.data.documents:all_found"),)),
        cold_start=ColdStart(
            steps=250,
            data=Generated(TASK, arguments=("tokens=256", "shortest=12"), train_problems=16_000),
            max_prompt_tokens=288,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=6e-3, warmup_updates=10, decay="linear", weight_decay=0.0),
        ),
        algorithm=GRPO(responses_per_update=192),
        rollout=Rollout(
            prompts_per_step=8, responses_per_prompt=24, max_prompt_tokens=LONGEST_PROMPT, max_response_tokens=8
        ),
        actor=Training(
            optimizer=Optimizer(learning_rate=2e-3, warmup_updates=2, weight_decay=0.0),
            tokens_per_microbatch=LONGEST_PROMPT + 8,
        ),
        steps=48,
        evaluation=Evaluation(
            every_steps=12,
            problems=64,
            sets=(
                EvaluationSet(
                    name="longest",
                    data=Generated(TASK, arguments=(f"tokens={WORDS}",), train_problems=384, eval_problems=64),
                    problems=64,
                ),
            ),
        ),
    )
