"""`python -m jaxrlhf.evaluate --config NAME`: accuracy of a trained policy, greedy or pass@k.

Data set and rewards are those of the configuration. The policy is the newest checkpoint of the configuration's workdir,
the checkpoint of `--step`, or `--policy`: another run's workdir or a Hugging Face directory.
"""

from jaxrlhf.config import CommandLine, Refusal, run_command


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf evaluate",
        description="Evaluate a policy on held-out problems.",
        examples=[
            ("--config ppo_gsm8k", "greedy accuracy of the newest checkpoint of runs/ppo_gsm8k"),
            ("--config ppo_gsm8k --step 40 --samples 8", "pass@k of another checkpoint"),
            ("--config ppo_gsm8k --policy Qwen/Qwen2.5-0.5B-Instruct", "of a checkpoint of the hub"),
        ],
    )
    command.add_argument("--policy", default=None, help="a run's workdir, Hugging Face directory, GGUF file or hub id")
    command.add_argument("--step", type=int, default=None, help="checkpoint of the run; default: the newest")
    command.add_argument("--samples", type=int, default=1, help="answers per problem; above 1 reports pass@k")
    command.add_argument("--show", type=int, default=5, help="answers to print")
    config, flags = command.parse_config()
    if flags.samples < 1:
        raise Refusal(f"--samples must be 1 or more, got {flags.samples}")
    if flags.show < 0:
        raise Refusal(f"--show must be 0 or more, got {flags.show}")

    from jaxrlhf.trainer.failures import one_message
    from jaxrlhf.trainer.policy import evaluate_policy

    with one_message():
        evaluate_policy(config, policy=flags.policy, samples=flags.samples, show=flags.show, step=flags.step)


if __name__ == "__main__":
    run_command(main)
