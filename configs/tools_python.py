"""GRPO with a Python interpreter, from random weights: products that the model cannot compute without the tool.

    python -m jaxrlhf.train --config tools_python.py

Three in ten demonstrations write a program, and one in twenty of these programs never ends; the other demonstrations
guess. The reward of GRPO depends only on the number at the end; the policy learns to write programs that end. Programs
run in the sandbox of `CodeReward`.

Result: after the cold start hardly any held-out answer is right; after eight steps 96, 92 and 80 % are right (three
seeds).

Source: Feng et al. 2025 (ReTool, arXiv:2504.11536), with a small form of its tool.
"""

from jaxrlhf.config import (
    GRPO,
    SFT,
    ArithmeticReward,
    ColdStart,
    Config,
    Evaluation,
    FromScratch,
    Generated,
    Optimizer,
    Rewards,
    Rollout,
    Tools,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="tools_python",
        model=FromScratch(),
        data=Generated("jaxrlhf.data.generated:programs", train_problems=12_800),
        environment=Tools(
            functions=("jaxrlhf.rewards.sandbox.interpreter:python",),
            max_turns=3,
            observation_tokens=32,
            call_s=30.0,
            workers=4,
        ),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        cold_start=ColdStart(
            steps=300,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, decay="linear", weight_decay=0.0),
        ),
        algorithm=GRPO(responses_per_update=64),
        rollout=Rollout(prompts_per_step=16, responses_per_prompt=8, max_prompt_tokens=32, max_response_tokens=64),
        actor=Training(
            optimizer=Optimizer(learning_rate=3e-4, warmup_updates=4, decay="linear", weight_decay=0.0),
            tokens_per_microbatch=4096,
        ),
        steps=8,
        evaluation=Evaluation(every_steps=4),
    )
