"""`python -m jaxrlhf.export RUN DIRECTORY`: write the policy or reward model of a run as a Hugging Face checkpoint.

The directory also gets a model card: base model, data, algorithm, settings, metrics of that step, the learning curve,
and how to load the model. RUN may also be a directory written by `python -m jaxrlhf.convert`, which gets no card.

    jaxrlhf export runs/math_grpo my_model --dtype bfloat16 --push me/my-model --private

`--push` uploads the directory to the hub, with the token of `hf auth login` or HF_TOKEN. Before the export, it refuses
a name or token that the hub would reject, and a repository that contains files, unless `--overwrite` allows to replace
them.
"""

from jaxrlhf.config import CommandLine, run_command
from jaxrlhf.trainer.publishing.export import Export, add_flags


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf export",
        description="Write a Hugging Face checkpoint.",
        examples=[
            ("runs/ppo_gsm8k my_policy", "the newest checkpoint of a run"),
            ("runs/ppo_gsm8k my_policy --step 40 --dtype bfloat16 --merge", "another checkpoint, with merged adapters"),
            ("runs/ppo_gsm8k my_policy --push me/my-policy", "also upload to the hub"),
            ("runs/ppo_gsm8k my_policy --gguf my_policy.gguf --gguf-type q8_0", "also write a GGUF file for llama.cpp"),
        ],
    )
    command.add_argument("run", help="workdir of a run, such as runs/ppo_arithmetic, or a converted checkpoint")
    command.add_argument("directory", help="directory for the checkpoint")
    command.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    add_flags(command)
    flags = command.parse_args()

    from jaxrlhf.trainer.failures import one_message

    with one_message():
        if export := Export.of(flags):
            export.write(flags.run, step=flags.step)


if __name__ == "__main__":
    run_command(main)
