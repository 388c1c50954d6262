"""Where scores come from: the parts that a response's score is the weighted sum of."""

from dataclasses import dataclass, field
from typing import Literal

from jaxrlhf.config.check import positive, require
from jaxrlhf.config.training import Layout


@dataclass(frozen=True)
class Gsm8kReward:
    """1 if the answer is right. `strict` wants `#### answer`; `flexible` takes the last number."""

    method: Literal["strict", "flexible"] = "strict"
    weight: float = 1.0


@dataclass(frozen=True)
class ArithmeticReward:
    """1 if the number after `####` equals the reference."""

    weight: float = 1.0


@dataclass(frozen=True)
class MathReward:
    """1 if the response's final answer equals the reference as mathematics; needs `jaxrlhf[math]`."""

    weight: float = 1.0


@dataclass(frozen=True)
class FormatReward:
    """1 if the whole response matches a regular expression."""

    pattern: str = r"(?s).*####\s*-?[\d,.]+\s*"
    weight: float = 0.1


@dataclass(frozen=True)
class FunctionReward:
    """A user's function, as `module:function` or `path/to/file.py:function`. See `jaxrlhf.rewards`."""

    function: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        require(
            ":" in self.function,
            f"FunctionReward.function must be 'module:function' or 'file.py:function', got {self.function!r}",
        )


@dataclass(frozen=True)
class ModelReward:
    """The score head of a sequence-classification checkpoint, read at the EOS of prompt and response.

    The prompt is the policy's text, chat marks included; for a model of another family write a
    `FunctionReward`.

    Attributes:
      layout: Over the devices of one host; each host of the pool scores its own responses.
    """

    path: str
    weight: float = 1.0
    layout: Layout = field(default_factory=Layout)


RewardPart = Gsm8kReward | ArithmeticReward | MathReward | FormatReward | FunctionReward | ModelReward


@dataclass(frozen=True)
class Rewards:
    """The score of a response is the weighted sum of its parts.

    Attributes:
      workers: Processes that run reward functions.
      timeout_s: Wall-clock limit of one call; past it the process is killed and the
        response is unscorable.
    """

    parts: tuple[RewardPart, ...] = (ArithmeticReward(),)
    workers: int = 2
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        positive(self, "workers", "timeout_s")
        require(len(self.parts) > 0, "Rewards.parts is empty; name at least one reward")

    @property
    def by_model(self) -> bool:
        """Whether a model of its own scores, and not only functions."""
        return any(isinstance(part, ModelReward) for part in self.parts)
