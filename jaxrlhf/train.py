"""`python -m jaxrlhf.train --config NAME`: run a configuration.

`--dry-run` stops after the table of derived settings. Any setting can be changed on the
command line by its dotted name; see `--help`.
"""

from jaxrlhf.config import CommandLine, run_command


def main() -> None:
    """The command."""
    command = CommandLine(prog="python -m jaxrlhf.train", description="Train a language model with RL.")
    command.add_argument("--dry-run", action="store_true", help="print the derived settings and stop")
    config, flags = command.parse_config()

    from jaxrlhf.controller.run import run

    result = run(config, dry_run=flags.dry_run)
    if not flags.dry_run and not result.finished:
        print(f"stopped after saving; the same command goes on from {result.workdir}")


if __name__ == "__main__":
    run_command(main)
