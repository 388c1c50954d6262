"""`jaxrlhf evaluate`: accuracy of a policy on a run's held-out problems, or its scores in tasks of lm_eval.

`--config NAME`: data set and rewards are those of the configuration, and answers are greedy or pass@k. The policy is
the newest checkpoint of the configuration's workdir, the checkpoint of `--step`, or `--policy`: another run's workdir
or a Hugging Face directory.

`POLICY --tasks NAMES`: tasks of EleutherAI's lm-evaluation-harness, or of the same form.
"""

import argparse
import sys
from pathlib import Path

from jaxrlhf.config import CommandLine, Refusal, run_command
from jaxrlhf.config.cli.outputs import check_file
from jaxrlhf.trainer.served_policy.flags import add_engine_flags, add_policy_flags, engine_sizes

_TASKS = "--tasks"


def main() -> None:
    """Run the command."""
    if any(word.partition("=")[0] == _TASKS for word in sys.argv[1:]):
        return _tasks()
    command = CommandLine(
        prog="jaxrlhf evaluate",
        description="Evaluate a policy on held-out problems; for tasks of lm_eval see `jaxrlhf evaluate --tasks NAMES "
        "--help`.",
        examples=[
            ("--config ppo_gsm8k", "greedy accuracy of the newest checkpoint of runs/ppo_gsm8k"),
            ("--config ppo_gsm8k --step 40 --samples 8", "pass@k of another checkpoint"),
            ("--config ppo_gsm8k --policy Qwen/Qwen2.5-0.5B-Instruct", "accuracy of a checkpoint of the hub"),
            ("runs/ppo_gsm8k --tasks arc_easy,hellaswag", "scores in tasks of lm_eval"),
        ],
    )
    add_policy_flags(command, "--policy")
    command.add_argument("--samples", type=int, default=1, help="answers per problem; above 1 reports pass@k")
    command.add_argument("--show", type=int, default=5, help="number of answers to print")
    config, flags = command.parse_config()
    if flags.samples < 1:
        raise Refusal(f"--samples must be 1 or more, got {flags.samples}")
    if flags.show < 0:
        raise Refusal(f"--show must be 0 or more, got {flags.show}")

    from jaxrlhf.trainer.failures import one_message
    from jaxrlhf.trainer.policy import evaluate_policy

    with one_message():
        evaluate_policy(config, policy=flags.policy, samples=flags.samples, show=flags.show, step=flags.step)


def _tasks() -> None:
    """Run the command for tasks of lm_eval."""
    command = CommandLine(
        prog="jaxrlhf evaluate",
        description="Evaluate a policy on tasks of EleutherAI's lm-evaluation-harness (pip install "
        "'jaxrlhf[evaluate]').",
        examples=[
            ("runs/my_run --tasks arc_easy,hellaswag --limit 100", "100 examples of each of two tasks"),
            ("model.gguf --tasks my_task --include-path tasks --dtype float32", "a task of a YAML file in tasks/"),
            ("runs/my_run --tasks gsm8k --num-fewshot 5 --apply-chat-template", "as chats with five examples"),
        ],
    )
    add_policy_flags(command)
    command.add_argument(_TASKS, required=True, help="names of tasks, separated by commas")
    command.add_argument("--include-path", type=Path, help="folder with more tasks, as YAML files of lm_eval")
    command.add_argument("--limit", type=float, help="examples per task, or their share if below 1; default: all")
    command.add_argument("--num-fewshot", type=int, help="solved examples in the prompt; default: as in the task")
    command.add_argument("--apply-chat-template", action="store_true", help="apply the chat template to examples")
    command.add_argument("--output-path", type=Path, help="JSON file for the results")
    add_engine_flags(command)
    flags: argparse.Namespace = command.parse_args()
    tasks = [name.strip() for name in flags.tasks.split(",") if name.strip()]
    if not tasks:
        raise Refusal("--tasks is empty; give names separated by commas")
    for name, value, least in (("--limit", flags.limit, 0), ("--num-fewshot", flags.num_fewshot, -1)):
        if value is not None and not value > least:
            raise Refusal(f"{name} must be {'above 0' if least == 0 else '0 or more'}, got {value:g}")
    if flags.include_path is not None and not flags.include_path.is_dir():
        raise Refusal(f"--include-path {flags.include_path} is not a folder; give a folder with YAML files")
    if flags.output_path is not None:
        check_file("--output-path", flags.output_path, ".json")

    from jaxrlhf.trainer.failures import one_message
    from jaxrlhf.trainer.served_policy.harness import evaluate_tasks
    from jaxrlhf.trainer.served_policy.load import load_policy

    with one_message():
        evaluate_tasks(
            load_policy(flags.policy, engine_sizes(flags), step=flags.step),
            Path(flags.policy).name or flags.policy,
            tasks,
            folder=flags.include_path,
            limit=flags.limit,
            num_fewshot=flags.num_fewshot,
            chat=flags.apply_chat_template,
            out=flags.output_path,
        )


if __name__ == "__main__":
    run_command(main)
