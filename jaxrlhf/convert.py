"""`python -m jaxrlhf.convert MODEL DIRECTORY`: write a Hugging Face checkpoint with its weights in orbax's format.

MODEL is a local directory or a hub id. The result is a model to start from, `--model.path DIRECTORY`, of which every
host reads only its own part. `python -m jaxrlhf.export` converts it back to a Hugging Face checkpoint. With
`--multihost` the command is started once on every host, and each host writes the part that its devices hold.
"""

import argparse
from pathlib import Path

from jaxrlhf.config import CommandLine, run_command
from jaxrlhf.config.cli.hosts import join_hosts


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf convert",
        description="Write the weights of a Hugging Face checkpoint with orbax.",
        examples=[("Qwen/Qwen3-8B models/qwen3", "start from the result on many hosts with --model.path models/qwen3")],
    )
    command.add_argument("model", help="local directory or hub id, such as Qwen/Qwen3-0.6B")
    command.add_argument("directory", help="directory for the converted checkpoint, visible to all hosts")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in the files")
    command.add_argument("--multihost", action="store_true", help="join all hosts on which this command was started")
    flags: argparse.Namespace = command.parse_args()

    import jax

    if flags.multihost:
        join_hosts()
    from jaxrlhf.checkpoint import convert
    from jaxrlhf.tracking import BytesBar
    from jaxrlhf.trainer.failures import one_message, writing

    with one_message(), writing(Path(flags.directory)), BytesBar("reading") as bar:
        convert(flags.model, flags.directory, dtype=flags.dtype, progress=bar)
    if jax.process_index() == 0:
        print(f"wrote the model to {flags.directory}, {bar.total / 1e9:.3g} GB")


if __name__ == "__main__":
    run_command(main)
