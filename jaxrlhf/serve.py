"""`python -m jaxrlhf.serve POLICY`: serve a policy with OpenAI's API, by default at 127.0.0.1.

POLICY is the workdir of a run, the directory of a Hugging Face checkpoint, or a hub id.
"""

import argparse
import secrets
from pathlib import Path

from jaxrlhf.config import CommandLine, Refusal, run_command
from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.trainer.served_policy.flags import add_engine_flags, add_policy_flags, engine_sizes


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf serve",
        description="Serve a policy with OpenAI's API.",
        examples=[
            ("runs/ppo_gsm8k", "the newest checkpoint of a run, at 127.0.0.1:8000"),
            ("Qwen/Qwen2.5-0.5B-Instruct --port 9000 --slots 64", "a checkpoint of the hub"),
        ],
    )
    add_policy_flags(command)
    command.add_argument("--vision", action="store_true", help="also load the vision tower, for chats with images")
    command.add_argument("--name", help="name of the model in the API; default: the last part of the policy's path")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every address")
    command.add_argument("--port", type=int, default=8000, help="port to listen on; 0 chooses a free port")
    command.add_argument("--api-key", help="API key that requests need; default: a new key, which is printed")
    command.add_argument("--no-api-key", action="store_true", help="accept requests without a key")
    command.add_argument("--requests", type=int, default=1024, help="largest number of requests in progress")
    command.add_argument("--timeout", type=float, default=600.0, help="time limit of an answer in seconds")
    add_engine_flags(command)
    flags: argparse.Namespace = command.parse_args()
    if flags.api_key and flags.no_api_key:
        raise Refusal("--api-key and --no-api-key cannot be combined; give only one")
    flags.name = flags.name or Path(flags.policy).name or Path(flags.policy).resolve().name  # the name of "." is empty
    limits = ServingLimits(requests=flags.requests, request_s=flags.timeout)
    token = None if flags.no_api_key else flags.api_key or f"sk-{secrets.token_urlsafe(24)}"

    from jaxrlhf.trainer.failures import one_message

    with one_message():
        serve(flags, limits, token)


def serve(flags: argparse.Namespace, limits: ServingLimits, token: str | None) -> None:
    """Load the policy and serve it until Ctrl-C."""
    from jaxrlhf.engine import EngineService
    from jaxrlhf.serving.served import ServedModel
    from jaxrlhf.serving.server import Server
    from jaxrlhf.trainer.served_policy.load import load_policy

    loaded = load_policy(flags.policy, engine_sizes(flags), step=flags.step, vision=flags.vision)
    with EngineService(loaded.engine) as service:
        parts = loaded.tokenizer, loaded.stop_tokens, limits, loaded.images
        model = ServedModel(flags.name, service, *parts, today=True)
        with Server(model, host=flags.host, port=flags.port, token=token) as server:
            print(f"serving {flags.name} at {server.address}/v1", flush=True)
            print("no key is required" if token is None else f"key: {token}", flush=True)
            server.wait()


if __name__ == "__main__":
    run_command(main)
