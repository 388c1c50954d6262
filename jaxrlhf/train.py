"""`python -m jaxrlhf.train --config NAME`: run a configuration.

`--dry-run` stops after the table of derived settings. `--export DIRECTORY` writes the trained model as a Hugging Face
checkpoint, for example for the next stage, and `--push` uploads it with a model card; an export or upload that would
fail is refused before the training. `--cluster ray` runs on hosts joined by Ray. Any setting can be changed on the
command line by its dotted name; see `--help`.
"""

import signal
import sys

from jaxrlhf.config import CommandLine, on_cluster, run_command
from jaxrlhf.trainer.publishing.export import Export, add_flags

STOPPED_CODE = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM ended before its last step, as in shells.

With code 0 a scheduler would not start the run again.
"""


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf train",
        description="Train a language model with RL.",
        examples=[
            ("--config ppo_arithmetic", "a run without downloads"),
            ("--config grpo_gsm8k --model.path Qwen/Qwen2.5-0.5B-Instruct --actor.lora.rank 16", "with adapters"),
            ("--config my_run.py --dry-run", "check settings and data, then stop"),
            ("--config my_run.py --export my_model", "also write the trained model as a Hugging Face checkpoint"),
            ("--config my_run.py --export my_model --push me/my-model --private", "also upload the model"),
        ],
    )
    command.add_argument("--dry-run", action="store_true", help="print the derived settings and stop")
    command.add_argument(
        "--cluster",
        choices=["ray", "None"],
        help="run on hosts joined by Ray, on a cluster started on this machine or the cluster at --cluster.address; "
        "--devices and --cluster.devices-per-host set the number of hosts; None runs in this process",
    )
    command.add_argument(
        "--export", dest="directory", metavar="DIRECTORY", help="directory for the trained Hugging Face model"
    )
    add_flags(command)
    config, flags = command.parse_config(implied=on_cluster)

    from jaxrlhf.trainer.failures import one_message
    from jaxrlhf.trainer.run import STOPPED, run

    with one_message():
        if export := Export.of(flags):
            export.check(config)  # before the training rather than after it
        result = run(config, dry_run=flags.dry_run)
        if not flags.dry_run and not result.finished:
            print(f"{STOPPED} {result.workdir}")
            sys.exit(STOPPED_CODE)
        elif export and not flags.dry_run:
            export.write(result.workdir)


if __name__ == "__main__":
    run_command(main)
