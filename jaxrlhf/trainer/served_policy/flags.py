"""Flags of commands that take a policy, and the engine sizes that the flags set."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config import CommandLine


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of a serving engine.

    Attributes:
      slots: Number of responses decoded together.
      context_tokens: Maximum tokens of prompt and response together; None is 4096, or the model's positions if fewer.
      response_tokens: Maximum tokens of a response; None is a quarter of the context.
      tensor: Number of devices that split every layer (tensor parallelism).
      dtype: Dtype of weights and computation.
      speculation: Setting `rollout.speculation`.
    """

    slots: int = 32
    context_tokens: int | None = None
    response_tokens: int | None = None
    tensor: int = 1
    dtype: str = "bfloat16"
    speculation: Literal["auto"] | None = None


def add_policy_flags(command: CommandLine, name: str = "policy", *, also: str = "") -> None:
    """Add the argument or flag that names a policy, and `--step`.

    Args:
      also: What else the argument may be.
    """
    command.add_argument(name, help=f"workdir of a run, Hugging Face directory, GGUF file or hub id{also}")
    command.add_argument("--step", type=int, help="step of a run's checkpoint; default: the newest")


def add_engine_flags(command: CommandLine, *, slots: int = 32) -> None:
    """Add the flags that set how a policy is loaded."""
    command.add_argument("--slots", type=int, default=slots, help="number of responses decoded together")
    command.add_argument(
        "--context", type=int, help="maximum tokens of prompt and response; default: 4096, or the model's if fewer"
    )
    command.add_argument(
        "--max-tokens", type=int, help="maximum tokens of a response; default: a quarter of the context"
    )
    command.add_argument("--tensor", type=int, default=1, help="number of devices that split every layer")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    command.add_argument(
        "--speculation", choices=("auto",), help="auto verifies drafts where this is faster; default: no drafts"
    )


def engine_sizes(flags: Namespace) -> EngineSizes:
    """Return the engine sizes that the flags set."""
    return EngineSizes(
        flags.slots, flags.context, flags.max_tokens, flags.tensor, flags.dtype, speculation=flags.speculation
    )
