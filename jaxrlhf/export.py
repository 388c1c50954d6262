"""`python -m jaxrlhf.export RUN DIRECTORY`: the policy or reward model of a run as a Hugging Face checkpoint.

Beside the weights lies a model card: base, data, algorithm, settings, figures of that step, the learning curve, and how
to load it. RUN may also be what `python -m jaxrlhf.convert` wrote; that has no card.

    jaxrlhf export runs/math_grpo my_model --dtype bfloat16 --push me/my-model --private

`--push` uploads the directory to the hub, with the token of `hf auth login` or HF_TOKEN. Before anything is exported it
refuses a name or a token that the hub would not take, and a repository that holds files, unless `--overwrite` says that
they are to go.
"""

from jaxrlhf.config import CommandLine, run_command
from jaxrlhf.trainer.publishing.export import Export, add_flags


def main() -> None:
    """The command."""
    command = CommandLine(
        prog="jaxrlhf export",
        description="Write a Hugging Face checkpoint.",
        examples=[
            ("runs/ppo_gsm8k my_policy", "the newest checkpoint of a run"),
            ("runs/ppo_gsm8k my_policy --step 40 --dtype bfloat16 --merge", "another one, adapters merged"),
            ("runs/ppo_gsm8k my_policy --push me/my-policy", "to the hub as well"),
            ("runs/ppo_gsm8k my_policy --gguf my_policy.gguf --gguf-type q8_0", "for llama.cpp as well"),
        ],
    )
    command.add_argument("run", help="workdir of a run, such as runs/ppo_arithmetic, or a converted checkpoint")
    command.add_argument("directory", help="where the checkpoint goes")
    command.add_argument("--step", type=int, help="which checkpoint of a run; the newest by default")
    add_flags(command)
    flags = command.parse_args()

    from jaxrlhf.trainer.failures import one_message

    with one_message():
        if export := Export.of(flags):
            export.write(flags.run, step=flags.step)


if __name__ == "__main__":
    run_command(main)
