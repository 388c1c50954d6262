"""Mathematics with a Python interpreter, from Qwen2.5-7B-Instruct, on a machine of eight H100.

    python -m jaxrlhf.train --config retool_7b.py

The policy may call the tool `python` up to 15 times; programs run in a sandbox. The policy is trained only on its own
tokens. ReTool starts with supervised training on solutions with calls; set `--model.path` to such a policy.

Planned: Qwen2.5-7B-Instruct on h100x1x8 50 of 75 GiB of a device, 264 s a step, 14.6 h.

Source: Feng et al. 2025 (ReTool, arXiv:2504.11536); settings of verl's recipe of it
(https://github.com/volcengine/verl, recipe/retool/run_qwen2_7b_dapo.sh); the problems are those of Yu et al. 2025
(DAPO, arXiv:2503.14476).
"""

from jaxrlhf.config import (
    GRPO,
    Config,
    Evaluation,
    EvaluationSet,
    HubData,
    MathReward,
    Optimizer,
    PolicyLoss,
    Pretrained,
    Rewards,
    Rollout,
    Tools,
    Training,
)

RESPONSES_PER_PROMPT = 16


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="retool_7b",
        model=Pretrained("Qwen/Qwen2.5-7B-Instruct"),
        data=HubData("open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution", evaluation=None),
        system_prompt="Work it out, with the tool where computing helps, and give the final answer in \\boxed{}.",
        environment=Tools(
            functions=("jaxrlhf.rewards.sandbox.interpreter:python",),
            max_turns=16,
            observation_tokens=512,
            call_s=20.0,
            workers=64,
        ),
        rewards=Rewards(parts=(MathReward(),), workers=8),
        algorithm=GRPO(
            responses_per_update=16 * RESPONSES_PER_PROMPT, policy=PolicyLoss(clip_high=0.28, dual_clip=10.0)
        ),
        rollout=Rollout(
            prompts_per_step=64,
            responses_per_prompt=RESPONSES_PER_PROMPT,
            max_prompt_tokens=2048,
            max_response_tokens=16_384,
        ),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6), tokens_per_microbatch=8 * 18_432),
        placement="auto",
        steps=200,
        evaluation=Evaluation(
            every_steps=10,
            sets=(
                EvaluationSet(
                    name="aime_2024",
                    data=HubData("HuggingFaceH4/aime_2024", prompt_key="problem", evaluation="train"),
                    samples=30,
                ),
            ),
        ),
    )
