"""The protocol of engines that generate rollouts, and the policy's weights as one may take them.

`Engine` is the one of this project. Another, such as a server of its own, takes named tensors and answers requests
with tokens and their log-probabilities.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.batch import Params
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine.sequence import Completion, Request
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.save import named_tensors, save_each
from jaxrlhf.models.lora.lora import Adapted, change_of
from jaxrlhf.models.parameters import path_name


@dataclass(frozen=True)
class PolicyWeights:
    """One version of the policy's weights.

    Attributes:
      params: Weights in the generation layout; adapters are laid over those that they belong to.
      version: Steps that have updated them.
      spent: Tree of bools: which of `params` nobody else reads, so that an engine may delete them; None is none.
    """

    config: AnyModel
    params: Params
    version: int
    spent: Any = None

    def tensors(self, dtype: Any = jnp.bfloat16) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors by the names of a Hugging Face checkpoint, one after another on the host; adapters are merged.

        Raises:
          Refusal: The model has no such format.
        """
        yield from named_tensors(self._whole(), self._shape(), "lm", dtype=dtype)

    def save(self, folder: Path, *, dtype: Any, tokenizer: Any, source: str | None) -> None:
        """Write them as a Hugging Face checkpoint, adapters merged; see `save_each`."""
        save_each(self._whole(), self._shape(), "lm", folder, dtype=dtype, tokenizer=tokenizer, source=source)

    def _whole(self) -> Iterator[tuple[str, jax.Array]]:
        """Every parameter with its path, adapters added to what they belong to."""
        for path, leaf in jax.tree.leaves_with_path(self.params, is_leaf=lambda node: isinstance(node, Adapted)):
            yield path_name(path), leaf.weight + change_of(leaf.adapter) if isinstance(leaf, Adapted) else leaf

    def _shape(self) -> ModelConfig:
        if not isinstance(self.config, ModelConfig):
            raise Refusal(f"{self.config.name} has no tensors in the format of Hugging Face")
        return self.config


class RolloutEngine(Protocol):
    """An engine that answers requests with the weights that it was given last."""

    def update_weights(self, weights: PolicyWeights) -> None:
        """Take a version of the weights; none is under way."""

    def unload(self) -> None:
        """Let go of the weights and of what was computed with them, where devices are shared."""

    def compile_ahead(self, prompt_lengths: Sequence[int]) -> None:
        """Get ready for prompts of these lengths."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """One completion for each request, in their order; see `Engine.generate`."""
