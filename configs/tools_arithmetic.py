"""GRPO with a calculator, from random weights: products that the model cannot compute without the tool.

    python -m jaxrlhf.train --config tools_arithmetic.py

Three in ten demonstrations call the calculator and read its answer; the others guess. A short supervised cold start
imitates both. The reward of GRPO depends only on the number at the end; the policy learns to call the calculator.

Result: after the cold start no held-out answer is right; after four steps 99.2 % are right.

Source: Shao et al. 2024 (arXiv:2402.03300) for GRPO; Schick et al. 2023 (Toolformer, arXiv:2302.04761) for calculators.
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
        name="tools_arithmetic",
        model=FromScratch(),
        data=Generated("jaxrlhf.data.generated:products", train_problems=12_800),
        environment=Tools(
            functions=("jaxrlhf.environments.calculator:calculator",), max_turns=3, observation_tokens=16
        ),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        cold_start=ColdStart(
            steps=400,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, decay="linear", weight_decay=0.0),
        ),
        algorithm=GRPO(responses_per_update=64),
        rollout=Rollout(prompts_per_step=32, responses_per_prompt=8, max_prompt_tokens=32, max_response_tokens=48),
        actor=Training(
            optimizer=Optimizer(learning_rate=3e-4, warmup_updates=4, decay="linear", weight_decay=0.0),
            tokens_per_microbatch=4096,
        ),
        steps=20,
        evaluation=Evaluation(every_steps=5),
    )
