"""`python -m jaxrlhf.export RUN DIRECTORY`: the policy or reward model of a run as a Hugging Face checkpoint."""

import argparse

from jaxrlhf.config import CommandLine, run_command


def main() -> None:
    """The command."""
    command = CommandLine(prog="python -m jaxrlhf.export", description=__doc__)
    command.add_argument("run", help="workdir of a run, such as runs/ppo_arithmetic")
    command.add_argument("directory", help="where the checkpoint goes")
    command.add_argument("--step", type=int, default=None, help="which checkpoint; the newest by default")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    flags: argparse.Namespace = command.parse_args()

    from jaxrlhf.controller.policy import export_policy

    step = export_policy(flags.run, flags.directory, step=flags.step, dtype=flags.dtype)
    print(f"wrote the model of step {step} to {flags.directory}")


if __name__ == "__main__":
    run_command(main)
