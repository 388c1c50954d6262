"""`python -m jaxrlhf.chat POLICY`: chat with a policy in the terminal.

POLICY is an argument of `python -m jaxrlhf.serve`, or the address of any server with OpenAI's API, such as
`http://127.0.0.1:8000/v1`. The key of a server is `--api-key` or the environment variable OPENAI_API_KEY.
"""

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jaxrlhf.config import CommandLine, Refusal, run_command
from jaxrlhf.trainer.served_policy.flags import add_engine_flags, add_policy_flags, engine_sizes

_HELP = (
    "an empty line or Ctrl-D ends the chat, /new starts a new chat, /again samples the last answer again, "
    "/image FILE attaches an image to the next message"
)


_ADDRESS = ("http://", "https://")
_LOADING = ("vision", "step", "slots", "context", "tensor", "dtype", "speculation")
"""Flags for loading a policy."""


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf chat",
        description="Chat with a policy or a server.",
        examples=[
            ("runs/ppo_gsm8k --system 'Be brief.'", "with the policy of a run"),
            ("runs/grpo_shapes --vision", "with a vision-language policy: /image FILE attaches an image"),
            ("http://127.0.0.1:8000/v1 --api-key sk-...", "with a server"),
        ],
    )
    add_policy_flags(command, also=", or address of a server")
    command.add_argument("--vision", action="store_true", help="also load the vision tower of the policy")
    command.add_argument("--model", help="name of the model on the server; default: its first model")
    command.add_argument("--api-key", help="API key of the server; default: the environment variable OPENAI_API_KEY")
    command.add_argument("--system", help="system prompt")
    command.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0 is greedy")
    command.add_argument("--seed", type=int, help="sampling seed; equal seeds give equal answers")
    add_engine_flags(command, slots=1)
    flags: argparse.Namespace = command.parse_args()
    loading = [name for name in _LOADING if getattr(flags, name) != command.get_default(name)]
    if loading and flags.policy.startswith(_ADDRESS):
        given = ", ".join(f"--{name}" for name in loading)
        raise Refusal(f"{given} cannot be used with a server, got {flags.policy}; remove these flags")

    from jaxrlhf.tracking import default_console
    from jaxrlhf.trainer.failures import one_message

    with one_message(), ExitStack() as stack:
        client, model = _client(flags, stack)
        default_console().print(f"{model}: {_HELP}", style="dim", markup=False)
        chat(client, model, flags, ask=lambda: default_console().input("[bold]you[/bold] "))


def chat(client: Any, model: str, flags: argparse.Namespace, *, ask: Callable[[], str]) -> None:
    """Read messages and answer them until the user ends the chat."""
    from openai import APIError

    from jaxrlhf.data.images import data_url
    from jaxrlhf.tracking import default_console, visible

    initial = [{"role": "system", "content": flags.system}] if flags.system else []
    messages, console, images = list(initial), default_console(), list[dict[str, Any]]()
    while True:
        try:
            words = ask().strip()
        except EOFError:
            return
        if not words:
            return
        before = list(messages)
        if words == "/new":
            messages, images = list(initial), []
            continue
        if words.startswith("/image "):
            try:
                url = data_url(Path(words.removeprefix("/image ").strip()).expanduser().read_bytes())
                images.append({"type": "image_url", "image_url": {"url": url}})
            except (OSError, RuntimeError) as error:  # the file, or the user's home folder, does not exist
                console.print(visible(str(error)), style="red", markup=False, highlight=False)
            continue
        if words == "/again" and messages and messages[-1]["role"] == "assistant":
            messages.pop()
        elif words == "/again":
            continue
        else:
            content: Any = [*images, {"type": "text", "text": words}] if images else words
            messages.append({"role": "user", "content": content})
            images = []
        options = {} if flags.seed is None else {"seed": flags.seed}
        options |= {} if flags.max_tokens is None else {"max_tokens": flags.max_tokens}
        answer = ""
        try:
            stream = client.chat.completions.create(
                model=model, messages=messages, temperature=flags.temperature, stream=True, **options
            )
            for choice in (event.choices[0] for event in stream if event.choices):
                thinking = getattr(choice.delta, "reasoning_content", None)
                if thinking:
                    console.print(visible(thinking), end="", style="dim", markup=False, highlight=False, soft_wrap=True)
                console.print(
                    visible(choice.delta.content or ""), end="", markup=False, highlight=False, soft_wrap=True
                )
                answer += choice.delta.content or ""
                if choice.finish_reason == "length":
                    console.print(" [dim](truncated at the token limit)[/dim]", end="")
            console.print()
        except APIError as error:
            console.print(visible(error.message), style="red", markup=False, highlight=False)
            messages = before
            continue
        messages.append({"role": "assistant", "content": answer})


def _client(flags: argparse.Namespace, stack: ExitStack) -> tuple[Any, str]:
    """Return a client and the name of its model; a policy is served while the chat lasts."""
    from openai import APIError, OpenAI

    if flags.policy.startswith(_ADDRESS):
        key = flags.api_key or os.environ.get("OPENAI_API_KEY") or "none"
        client = stack.enter_context(OpenAI(base_url=flags.policy.rstrip("/"), api_key=key))
        try:
            names = [flags.model] if flags.model else [model.id for model in client.models.list()]
        except APIError as error:
            raise Refusal(f"{flags.policy} does not answer with OpenAI's API ({error.message}); start it") from error
        if not names:
            raise Refusal(f"{flags.policy} lists no models; give --model NAME")
        return client, names[0]
    from jaxrlhf.engine import EngineService
    from jaxrlhf.serving.served import ServedModel
    from jaxrlhf.serving.server import Server
    from jaxrlhf.trainer.served_policy.load import load_policy

    loaded = load_policy(flags.policy, engine_sizes(flags), step=flags.step, vision=flags.vision)
    service = stack.enter_context(EngineService(loaded.engine))
    name = flags.model or "policy"
    model = ServedModel(name, service, loaded.tokenizer, loaded.stop_tokens, images=loaded.images, today=True)
    server = stack.enter_context(Server(model, token="chat"))
    return stack.enter_context(OpenAI(base_url=f"{server.address}/v1", api_key="chat")), model.name


if __name__ == "__main__":
    run_command(main)
