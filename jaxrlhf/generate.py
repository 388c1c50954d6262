"""`jaxrlhf generate POLICY PROMPTS OUT`: completions of a file of prompts, all of them or the best by a reward.

A line of OUT is a record of PROMPTS with its `completion`, the completion's number as `sample` and, if there is a
reward, its `score`. It is supervised data for `PromptFile(OUT, solution_key="completion")`.
"""

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxrlhf.config import (
    Algorithm,
    CommandLine,
    Config,
    Pretrained,
    PromptFile,
    Refusal,
    RepetitionReward,
    Rewards,
    RoleSpec,
    Rollout,
    Training,
    run_command,
)
from jaxrlhf.config.cli.outputs import check_file
from jaxrlhf.config.roles import REWARD, actor
from jaxrlhf.trainer.served_policy.flags import add_policy_flags

_AT_ONCE: dict[str, Any] = {
    "staleness": 0,
    "over_provision": 1.0,
    "order": "deterministic",
    "replay_routing": False,
    "quantize": None,
    "server": None,
}
"""Rollout settings that are reset, because nothing learns from the responses."""


@dataclass(frozen=True)
class Answering(Algorithm):
    """Algorithm that answers and scores without learning."""

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training), REWARD)

    def updates_per_step(self, rollout: Rollout) -> int:
        return 1


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf generate",
        description="Generate completions of a file of prompts. Settings are those of --config or, without --config, "
        "of a file with a field 'prompt'; --data.prompt-key, --system-prompt, --rollout.max-response-tokens, "
        "--rollout.sampling.temperature, --rewards.parts.0 and others can be given. --rollout.prompts-per-step prompts "
        "are completed and written at a time.",
        examples=[
            ("Qwen/Qwen2.5-0.5B-Instruct prompts.jsonl answers.jsonl", "one greedy answer to each prompt"),
            ("runs/my_run prompts.parquet answers.parquet --samples 8", "eight sampled answers to each prompt"),
            ("runs/my_run prompts.jsonl answers.jsonl --data.image-key images", "for prompts with images"),
            (
                "runs/my_run train.jsonl best.jsonl --samples 8 --best --reward MathReward --data.answer-key answer",
                "the best answer by a reward",
            ),
            ("runs/my_run train.jsonl best.jsonl --samples 8 --best --reward mine.py:score", "by your own function"),
            ("runs/my_run train.jsonl best.jsonl --samples 8 --best --config my_run.py", "by the rewards of a run"),
        ],
    )
    add_policy_flags(command)
    command.add_argument("prompts", help="file of prompts: JSON lines, JSON or parquet")
    command.add_argument("out", help="file of completions: .jsonl or .parquet")
    command.add_argument(
        "--samples", type=int, default=1, help="answers per prompt; one is greedy, several are sampled"
    )
    command.add_argument("--best", action="store_true", help="keep only the answer with the highest score")
    command.add_argument("--reward", help="reward for scores: a class such as MathReward, or file.py:function")
    config, flags = command.parse_config(implied=_reward_settings, default=_default())
    _check(flags)
    scored = flags.reward is not None or flags.config is not None
    config = _answering(config, flags.prompts)

    from jaxrlhf.trainer.failures import one_message, writing
    from jaxrlhf.trainer.served_policy.completions import write_completions

    sampling = config.rollout.sampling
    with one_message(), writing(Path(flags.out)):
        rows = write_completions(
            config,
            flags.policy,
            Path(flags.out),
            step=flags.step,
            samples=flags.samples,
            sampling=sampling if flags.samples > 1 else replace(sampling, greedy=True),
            scored=scored,
            best=flags.best,
        )
    print(f"wrote {rows} completions to {flags.out}")


def _default() -> Config:
    """Return the settings that are used without a configuration."""
    return Config(
        "generate",
        algorithm=Answering(),
        steps=1,
        model=Pretrained(""),
        data=PromptFile("", answer_key=None),
        rollout=Rollout(prompts_per_step=64, max_prompt_tokens=2048, max_response_tokens=1024, slots=64),
        rewards=Rewards((RepetitionReward(),)),  # placeholder that --reward replaces
    )


def _reward_settings(flags: Namespace) -> list[str]:
    """Return the settings that `--reward` stands for."""
    if flags.reward is None:
        return []
    if ":" not in flags.reward:
        return [f"--rewards.parts.0={flags.reward}"]
    return ["--rewards.parts.0=FunctionReward", f"--rewards.parts.0.function={flags.reward}"]


def _check(flags: Namespace) -> None:
    if flags.samples < 1:
        raise Refusal(f"--samples must be 1 or more, got {flags.samples}")
    if flags.best and flags.reward is None and flags.config is None:
        raise Refusal("--best requires scores; give --reward or --config")
    check_file("OUT", Path(flags.out), ".jsonl", ".parquet")
    if Path(flags.out).exists():
        raise Refusal(f"{flags.out} already exists; choose another file, or delete this file")


def _answering(config: Config, prompts: str) -> Config:
    """Return the configuration changed to answer a file of prompts without learning."""
    data = config.data if isinstance(config.data, PromptFile) else PromptFile("", answer_key=None)
    model = config.model
    if isinstance(model, Pretrained) and data.image_key is not None:
        model = replace(model, vision=True)
    return replace(
        config,
        model=model,
        algorithm=Answering(),
        rollout=replace(config.rollout, **_AT_ONCE),
        data=replace(data, train=prompts, evaluation=None, solution_key=None),
        environment=None,
        cold_start=None,
        reference_layout=None,
        pools=(),
        offload=(),
    )


if __name__ == "__main__":
    run_command(main)
