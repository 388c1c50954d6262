"""GRPO on GSM8K from Qwen2.5-Instruct of any size, on any devices.

    python -m jaxrlhf.train --config gsm8k_grpo.py --model.path Qwen/Qwen2.5-7B-Instruct

The default size is 1.5B. A step has 1024 of the 7473 training problems with 5 responses each, and four updates; the run
has 15 epochs. One H100 is enough for 0.5B and 1.5B, a machine of eight H100 for 7B.

Planned: Qwen2.5-0.5B-Instruct on h100x1x1 46 of 75 GiB of a device, 34 s a step, 1.0 h; Qwen2.5-1.5B-Instruct on
h100x1x1 51 of 75 GiB of a device, 103 s a step, 3.0 h; Qwen2.5-7B-Instruct on h100x1x8 48 of 75 GiB of a device, 59 s a
step, 1.7 h.

Source: verl's example of this task (https://github.com/volcengine/verl, examples/grpo_trainer/run_qwen2-7b.sh); Shao et
al. 2024 (arXiv:2402.03300); the problems are Cobbe et al. 2021 (arXiv:2110.14168).
"""

from dataclasses import replace

from jaxrlhf.config import GRPO, Config, KLInLoss, Optimizer, Pretrained, Training, load

PROMPTS_PER_STEP, RESPONSES_PER_PROMPT = 1024, 5


def get_config() -> Config:
    """Return the configuration of the run; data, reward and evaluation are those of `grpo_gsm8k.py`."""
    small = load("grpo_gsm8k")
    return replace(
        small,
        name="gsm8k_grpo",
        model=Pretrained("Qwen/Qwen2.5-1.5B-Instruct"),
        algorithm=GRPO(
            responses_per_update=PROMPTS_PER_STEP * RESPONSES_PER_PROMPT // 4,
            kl=KLInLoss(coefficient=0.001, estimator="k3"),
        ),
        rollout=replace(
            small.rollout,
            prompts_per_step=PROMPTS_PER_STEP,
            responses_per_prompt=RESPONSES_PER_PROMPT,
            max_response_tokens=1024,
            slots=None,
        ),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6), tokens_per_microbatch=65_536),
        placement="auto",
        steps=15 * (7473 // PROMPTS_PER_STEP),
    )
