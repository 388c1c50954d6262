"""Entry point of `jaxrlhf COMMAND ...` and `python -m jaxrlhf COMMAND ...`.

Each command is a module with a function `main`, and can also be started as `python -m jaxrlhf.COMMAND ...`.
"""

import difflib
import importlib
import sys

from jaxrlhf.config import Refusal, run_command
from jaxrlhf.version import __version__

COMMANDS = {
    "train": "run a configuration: reinforcement learning, supervised or on preferences",
    "evaluate": "accuracy of a policy on held-out problems, greedy or pass@k",
    "generate": "write a policy's completions of a file of prompts, all of them or the best by a reward",
    "view": "see runs in the browser",
    "serve": "a policy behind OpenAI's API",
    "chat": "talk to a policy or a server in the terminal",
    "plan": "find the best placement of a run on devices",
    "export": "write a run's policy as a Hugging Face checkpoint",
    "convert": "write a Hugging Face checkpoint's weights with orbax, for many hosts to read",
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
        print("\njaxrlhf COMMAND --help says more, with examples.")
        return
    if name == "--version":
        print(f"jaxrlhf {__version__}")
        return
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise Refusal(f"there is no command {name!r}; there are {', '.join(COMMANDS)}{hint}")
    sys.argv = [f"jaxrlhf {name}", *rest]
    importlib.import_module(f"jaxrlhf.{name}").main()


if __name__ == "__main__":
    main()
