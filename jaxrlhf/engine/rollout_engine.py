"""Protocol of engines that generate rollouts, and the policy weights that such an engine receives.

`Engine` is this project's own engine. Another engine, such as an inference server, takes named tensors and answers
requests with tokens and their log-probabilities.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf import models
from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine.sequence import Completion, Request
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.huggingface.save import named_tensors, save_each
from jaxrlhf.models.lora.lora import Adapted, change_of
from jaxrlhf.models.parameters import path_name


@dataclass(frozen=True)
class PolicyWeights:
    """One version of the policy's weights.

    Attributes:
      params: Weights in the generation layout; an adapted weight is an `Adapted` leaf, weight and adapter together.
      version: Number of steps that have updated the weights.
      donated: Tree of bools, True for leaves of `params` that nobody else reads, so an engine may delete them; None
        lets it delete no leaf.
    """

    config: AnyModel
    params: Params
    version: int
    donated: Any = None

    def tensors(self, dtype: Any = jnp.bfloat16) -> Iterator[tuple[str, np.ndarray]]:
        """Yield host tensors under the names of a Hugging Face checkpoint, one by one; adapters are merged.

        Raises:
          Refusal: The model has no Hugging Face format.
        """
        yield from named_tensors(self._whole(), self._shape(), "lm", dtype=dtype)

    def save(self, folder: Path, *, dtype: Any, tokenizer: Any, source: str | None) -> None:
        """Write the weights as a Hugging Face checkpoint, adapters merged; see `save_each`."""
        save_each(self._whole(), self._shape(), "lm", folder, dtype=dtype, tokenizer=tokenizer, source=source)

    def logps(self, tokens: Sequence[int], *, dtype: Any) -> np.ndarray:
        """Return the log-probabilities of a sequence's tokens after the first, at temperature 1, in a dtype."""
        token_1W = jnp.array([tokens], jnp.int32)
        return np.asarray(_logps(self.params, token_1W, config=self.config, execution=Execution(dtype=dtype)))[0, 1:]

    def _whole(self) -> Iterator[tuple[str, jax.Array]]:
        """Yield every parameter with its path; adapters are added to the weights they adapt."""
        for path, leaf in jax.tree.leaves_with_path(self.params, is_leaf=lambda node: isinstance(node, Adapted)):
            yield path_name(path), leaf.weight + change_of(leaf.adapter) if isinstance(leaf, Adapted) else leaf

    def _shape(self) -> ModelConfig:
        if not isinstance(self.config, ModelConfig):
            raise Refusal(f"{self.config.name} has no tensors in the format of Hugging Face")
        return self.config


@partial(jax.jit, static_argnames=("config", "execution"))
def _logps(params: Params, token_1W: Array, *, config: AnyModel, execution: Execution) -> Array:
    """Compute the log-probabilities of a sequence's tokens; the first token's is 0."""
    position_1W = jnp.arange(token_1W.shape[1], dtype=jnp.int32)[None]
    rows = token_1W, position_1W, jnp.ones_like(token_1W)
    hidden_1WD = models.hidden_states(params, config, *rows, execution=execution).hidden_RWD
    return models.token_logp(params, config, hidden_1WD, token_1W, position_1W > 0, execution=execution).logp


class RolloutEngine(Protocol):
    """Rollout engine that answers requests with the weights of the last `update_weights`."""

    def update_weights(self, weights: PolicyWeights) -> None:
        """Set the weights; called while no request is in progress."""

    def unload(self) -> None:
        """Free the weights and everything computed with them, for engines that share devices with training."""

    def compile_ahead(self, prompt_lengths: Sequence[int]) -> None:
        """Compile the programs for prompts of these lengths."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in the order of the requests; see `Engine.generate`."""


class RequestService(Protocol):
    """Service that answers requests of several threads while they join and leave, such as the replies of episodes.

    Attributes:
      held_s: Total seconds for which requests were held.
    """

    held_s: float

    def submit(self, request: Request, sampling: Sampling, *, seed: int) -> Future[Completion]:
        """Submit a request and return the future of its completion; thread-safe."""

    def release(self, request_id: int) -> None:
        """Release what is kept for later requests with the prefix of a request, such as the next turn."""

    def hold(self) -> None:
        """Hold new requests from now on, and wait until the requests in progress are answered."""

    def resume(self) -> None:
        """Answer the held requests, and new ones, with the engine's newest weights."""

    def close(self) -> None:
        """Cancel the requests in progress and end the service."""
