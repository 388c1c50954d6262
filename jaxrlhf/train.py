"""`python -m jaxrlhf.train --config NAME`: run a configuration.

`--dry-run` stops after the table of derived settings. Any setting can be changed on the
command line by its dotted name; see `--help`.
"""

import os

from jaxrlhf.config import CommandLine, run_command

# XLA:CPU sizes its thread pool from this; with several fake devices on few cores its
# collectives deadlock without it. It has to be set before JAX starts.
os.environ.setdefault("NPROC", "32")


def main() -> None:
    """The command."""
    command = CommandLine(prog="python -m jaxrlhf.train", description="Train a language model with RL.")
    command.add_argument("--dry-run", action="store_true", help="print the derived settings and stop")
    config, flags = command.parse_config()

    from jaxrlhf.controller.run import train

    result = train(config, dry_run=flags.dry_run)
    if not flags.dry_run and not result.finished:
        print(f"stopped after saving; the same command goes on from {result.workdir}")


if __name__ == "__main__":
    run_command(main)
