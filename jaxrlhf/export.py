"""`python -m jaxrlhf.export RUN DIRECTORY`: the policy or reward model of a run as a Hugging Face checkpoint.

Beside the weights lies a model card: base, data, algorithm, settings, figures of that step, the learning curve, and how
to load it. RUN may also be what `python -m jaxrlhf.convert` wrote; that has no card.

    jaxrlhf export runs/math_grpo my_model --dtype bfloat16 --push me/my-model --private

`--push` uploads the directory to the hub, with the token of `hf auth login` or HF_TOKEN. Before anything is exported it
refuses a name or a token that the hub would not take, and a repository that holds files, unless `--overwrite` says that
they are to go.
"""

import argparse
from pathlib import Path

from jaxrlhf.config import CommandLine, Refusal, run_command


def main() -> None:
    """The command."""
    command = CommandLine(
        prog="jaxrlhf export",
        description="Write a Hugging Face checkpoint.",
        examples=[
            ("runs/ppo_gsm8k my_policy", "the newest checkpoint of a run"),
            ("runs/ppo_gsm8k my_policy --step 40 --dtype bfloat16 --merge", "another one, adapters merged"),
            ("runs/ppo_gsm8k my_policy --push me/my-policy", "to the hub as well"),
        ],
    )
    command.add_argument("run", help="workdir of a run, such as runs/ppo_arithmetic, or a converted checkpoint")
    command.add_argument("directory", help="where the checkpoint goes")
    command.add_argument("--step", type=int, help="which checkpoint of a run; the newest by default")
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, or as a checkpoint was converted"
    )
    command.add_argument("--merge", action="store_true", help="add a run's adapters to the weights they belong to")
    command.add_argument("--average", action="store_true", help="the average of the weights that the run kept")
    command.add_argument("--push", metavar="OWNER/NAME", help="upload the directory to this repository of the hub")
    command.add_argument("--private", action="store_true", help="with --push: of a new repository")
    command.add_argument("--overwrite", action="store_true", help="with --push: replace what the repository holds")
    flags: argparse.Namespace = command.parse_args()
    if flags.push is None and (flags.private or flags.overwrite):
        raise Refusal("--private and --overwrite are of an upload; add --push OWNER/NAME, or drop them")

    from jaxrlhf.checkpoint.pretrained import export_converted, is_converted
    from jaxrlhf.tracking import BytesBar
    from jaxrlhf.trainer.failures import one_message, writing
    from jaxrlhf.trainer.policy import export_policy
    from jaxrlhf.trainer.publishing.push import check_push, push

    if flags.push is not None:
        check_push(flags.push, overwrite=flags.overwrite)
    with one_message(), writing(Path(flags.directory)), BytesBar("writing") as bar:
        if is_converted(flags.run):
            if flags.step is not None or flags.merge or flags.average:
                raise Refusal(f"{flags.run} is a converted checkpoint: it has no steps or adapters; drop the flags")
            export_converted(flags.run, flags.directory, dtype=flags.dtype, progress=bar)
            what = "model"
        else:
            dtype = flags.dtype or "float32"
            chosen = {"step": flags.step, "dtype": dtype, "merge": flags.merge, "average": flags.average}
            step = export_policy(flags.run, flags.directory, **chosen, name=flags.push, progress=bar)
            what = f"model of step {step}"
    print(f"wrote the {what} to {flags.directory}, {bar.total / 1e9:.3g} GB")
    if flags.push is not None:
        print(f"it is at {push(Path(flags.directory), flags.push, message=what, private=flags.private)}")


if __name__ == "__main__":
    run_command(main)
