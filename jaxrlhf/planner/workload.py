"""Workload of a step: the models of a dataflow, and how much each of them computes."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config import Lora, Rollout
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.lora.quantized import Format
from jaxrlhf.models.pipeline import PIPELINE_PARTS_PER_STAGE

Stage = Literal["generate", "prepare", "update"]
STAGES: tuple[Stage, ...] = ("generate", "prepare", "update")
"""Stages of a step, one after another. Source: HybridFlow (arXiv:2409.19256), section 2.1."""


@dataclass(frozen=True)
class Workload:
    """One step of an algorithm.

    Attributes:
      prompts: Distinct ones; each is prefilled once.
      responses: B, over all prompts.
      prompt_tokens: Mean length.
      response_tokens: Mean length.
      longest_tokens: Longest prompt and response together; memory is set aside for it.
      longest_prompt_tokens: Longest prompt, whose part of the cache its responses share where that lies in pages.
      updates: Optimizer updates of each trained model, over all epochs.
      epochs: Passes over the responses.
      slots: Most responses that are decoded at once, over all replicas; None is as many as fit.
      quantize: Format of the matrices that generate; None is the compute dtype.
    """

    prompts: int
    responses: int
    prompt_tokens: float
    response_tokens: float
    longest_tokens: int
    updates: int = 1
    epochs: int = 1
    slots: int | None = None
    quantize: Format | None = None
    longest_prompt_tokens: int = 0


@dataclass(frozen=True)
class Role:
    """One model of the dataflow, and what it does in a step.

    Attributes:
      name: Such as `actor`; unique in a problem.
      generates: It samples the responses.
      passes: Forward passes over all responses while they are prepared.
      trained: It is updated, and so has gradients and an optimizer.
      tokens_per_microbatch: Over all its devices, in rows of the longest length or more, into which sequences are
        packed; None goes by `rows_per_microbatch`, without rows and padding.
      rows_per_microbatch: Sequences that one data-parallel replica takes at a time.
      remat: Layers are recomputed in the backward pass; None decides by the room for their activations, and
        recomputes where JAX simulates devices on one processor.
      offloads: Inputs of layers that are recomputed wait in host memory.
      within_machine: Stages and tensor shards of one copy may not cross machines.
      lora: Adapters are trained, beside weights in the compute dtype.
      optimizer_bytes: Bytes that its optimizer keeps for a weight; None is what the software's keeps.
      undivided: What devices do not divide: the tokens of `rows`; while it generates the layers (`stage`), or positions
        of a cache (`context`).
    """

    name: str
    model: ModelConfig
    head: Head
    generates: bool = False
    passes: int = 1
    trained: bool = False
    tokens_per_microbatch: int | None = None
    rows_per_microbatch: int = 1
    remat: bool | None = True
    offloads: bool = False
    within_machine: bool = False
    lora: Lora | None = None
    optimizer_bytes: float | None = None
    undivided: tuple[str, ...] = ()

    def optimizer_bytes_with(self, software: "Software") -> float:
        """Bytes that the optimizer keeps for a weight."""
        return software.optimizer_bytes if self.optimizer_bytes is None else self.optimizer_bytes


@dataclass(frozen=True)
class Software:
    """Choices of programs that neither model nor layout say. The defaults are this package's in bfloat16.

    Attributes:
      weight_bytes: Bytes of a trained weight as it is trained.
      gradient_bytes: Bytes of a weight's gradient.
      optimizer_bytes: Bytes that the optimizer keeps for a weight.
      compute_bytes: Bytes of an activation, a cached key, a frozen or generating weight.
      reduces_every_microbatch: Gradients are summed over replicas at every microbatch, and not once in an update;
        None does so only where weights are split by width and also by stage or tensor.
      pipeline_parts_per_stage: Parts for each stage that a microbatch is cut into; None has a pipeline run through
        all microbatches of an update (1F1B) before it is drained.
      scatters_between_stages: Each tensor shard sends its part of the residual stream to the next stage.
      head_on_last_stage: The first stage looks tokens up and the last one computes the logits, and not all stages
        together; tables are gathered as layers are.
      adds_gradients: Each microbatch's gradient is whole before it is added to the others'.
      decodes_apart: Decoding reads layers that lie apart; the stack of them goes, unless it is trained as it is.
      cache_copies: Copies of the cache that exist at most while tokens are decoded.
      decode_tokens_per_dispatch: Tokens that one program decodes; None has no program start count.
      recomputes_logits: Chunks of logits are computed once more in the backward pass.
      reads_responses: Logits are computed of the tokens of responses alone, and not of all.
      skips_masked: Attention does not compute scores that the causal mask hides, nor keeps them.
      compiler: XLA's backend, whose copies are counted; None counts none. For TPUs it casts a device's weights of
        layers before all of them run; has a device's part of a microbatch's gradient once more, in the compute dtype in
        which it gathers it (that of experts as it is), where weights are split by width; has the MLP's activations of
        layers that are computed again in float32; and fills a head's part of the cache up. For GPUs it gives matrices
        that are split along other than their first dimension, experts and those that lead back to the residual stream,
        another order of dimensions before all layers run: that in which gathering appends.
      pages: The cache lies in pages, of which responses to one prompt share those that it fills.
      shares_prompts: A prompt is computed once for all its responses in a packed row, but for attention.
    """

    weight_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    compute_bytes: int = 2
    reduces_every_microbatch: bool | None = None
    pipeline_parts_per_stage: int | None = PIPELINE_PARTS_PER_STAGE
    scatters_between_stages: bool = False
    head_on_last_stage: bool = False
    adds_gradients: bool = True
    decodes_apart: bool = True
    cache_copies: float = 1.5
    decode_tokens_per_dispatch: int | None = Rollout.decode_tokens_per_dispatch
    recomputes_logits: bool = True
    reads_responses: bool = True
    skips_masked: bool = True
    shares_prompts: bool = True
    compiler: Literal["gpu", "tpu"] | None = None
    pages: bool = False

    @property
    def trains_in_compute_dtype(self) -> bool:
        """True if generation can take the trained weights as they are, so that no second copy exists."""
        return self.weight_bytes == self.compute_bytes

    @property
    def cache_lanes(self) -> int:
        """Numbers that a head's part of the cache is filled up to a multiple of, as TPUs lay arrays out."""
        return 128 if self.compiler == "tpu" else 1
