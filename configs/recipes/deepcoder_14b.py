"""Code with tests, from DeepSeek-R1-Distill-Qwen-14B: programs run in a sandbox, with reward 1 if every test passes.

    python -m jaxrlhf.train --config deepcoder_14b.py --cluster.address auto

GRPO as in DeepCoder: a higher upper clip, no KL, and no training on truncated responses. A problem has the inputs of a
program and the expected outputs. A step has 16 problems of PrimeIntellect for each problem of LiveCodeBench; the newer
problems of LiveCodeBench are held out. The run is for four machines of eight H100, with enough CPU cores for 64
processes that run programs. The next stage has responses of 32k tokens: `--rollout.max-response-tokens 32768` from the
export of this stage.

Planned: DeepSeek-R1-Distill-Qwen-14B on h100x4x8 52 of 75 GiB of a device, 652 s a step, 32.6 h.

Source: Luo et al. 2025 (DeepCoder, https://huggingface.co/agentica-org/DeepCoder-14B-Preview) for model, data, clip,
lengths and the number of GPUs; batch and learning rate are those of `deepscaler_1_5b.py`; the filter of truncated
responses and the clip are Yu et al. 2025 (DAPO, arXiv:2503.14476).
"""

from jaxrlhf.config import (
    DAPO,
    CodeReward,
    Config,
    Evaluation,
    HubData,
    Mixture,
    Optimizer,
    Pretrained,
    RayCluster,
    Rewards,
    Rollout,
    Sampling,
    Source,
    Training,
)

DATA = "agentica-org/DeepCoder-Preview-Dataset"
RESPONSES_PER_PROMPT = 8


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="deepcoder_14b",
        model=Pretrained("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
        data=Mixture(
            sources=(
                Source(name="primeintellect", data=problems("primeintellect"), weight=16),
                Source(name="livecodebench", data=problems("lcbv5", held_out="test"), weight=1),
            )
        ),
        system_prompt="Think first, then give one block with a whole Python program that reads input and prints.",
        rewards=Rewards(parts=(CodeReward(time_limit_s=6.0, total_s=50.0),), workers=64, timeout_s=60.0),
        algorithm=DAPO(
            responses_per_update=64 * RESPONSES_PER_PROMPT, max_rounds=1, overlong=None, mask_truncated=True
        ),
        rollout=Rollout(
            prompts_per_step=128,
            responses_per_prompt=RESPONSES_PER_PROMPT,
            max_prompt_tokens=2048,
            max_response_tokens=16_384,
            sampling=Sampling(temperature=0.6),
        ),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6), tokens_per_microbatch=32 * 18_432),
        placement="auto",
        cluster=RayCluster(devices_per_host=8),
        hardware="h100x4",
        steps=180,
        evaluation=Evaluation(every_steps=10),
    )


def problems(part: str, held_out: str | None = None) -> HubData:
    """Return a part of the data set; responses to problems whose tests call a function are left out as unscorable."""
    return HubData(DATA, subset=part, prompt_key="problem", answer_key=None, evaluation=held_out)
