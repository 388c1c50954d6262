"""Entry point of `jaxrlhf COMMAND ...` and `python -m jaxrlhf COMMAND ...`.

Each command is a module with a function `main`, and can also be started as `python -m jaxrlhf.COMMAND ...`.
"""

import difflib
import importlib
import sys

from jaxrlhf.config import Refusal, run_command
from jaxrlhf.version import __version__

COMMANDS = {
    "train": "train with a configuration: reinforcement learning, supervised or preferences",
    "evaluate": "measure the accuracy of a policy on held-out problems, greedy or pass@k",
    "generate": "generate completions of a file of prompts: all, or the best by a reward",
    "view": "show runs in the browser",
    "serve": "serve a policy with OpenAI's API",
    "chat": "chat with a policy or a server in the terminal",
    "plan": "find the best placement of a run on devices",
    "export": "write the policy of a run as a Hugging Face checkpoint",
    "convert": "write the weights of a Hugging Face checkpoint with orbax, for loading on many hosts",
}
"""Commands with a description each."""


def main() -> None:
    """Run the console script."""
    run_command(_command)


def _command() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: jaxrlhf COMMAND ...\n")
        print("\n".join(f"  {command:<{width}}  {what}" for command, what in COMMANDS.items()))
        print("\njaxrlhf COMMAND --help describes a command, with examples.")
        return
    if name == "--version":
        print(f"jaxrlhf {__version__}")
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise Refusal(f"unknown command {name!r}; the commands are {', '.join(COMMANDS)}{hint}")
    sys.argv = [f"jaxrlhf {name}", *rest]
    importlib.import_module(f"jaxrlhf.{name}").main()


if __name__ == "__main__":
    main()
