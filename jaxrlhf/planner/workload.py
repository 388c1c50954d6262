"""Workload of a step: the models of a dataflow, and the amount of work of each model."""

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
    """Workload of one step of an algorithm.

    Attributes:
      prompts: Number of distinct prompts; each prompt is prefilled once.
      responses: B, number of responses to all prompts.
      prompt_tokens: Mean length of a prompt.
      response_tokens: Mean length of a response.
      longest_tokens: Length of the longest prompt and response together; memory is reserved for this length.
      longest_prompt_tokens: Length of the longest prompt; responses share the prompt's cache if the cache is in pages.
      updates: Number of optimizer updates of each trained model, over all epochs.
      epochs: Number of passes over the responses.
      slots: Largest number of responses decoded at once, over all replicas; None is as many as fit.
      quantize: Format of the matrices for generation; None is the compute dtype.
      together: Number of the longest sequences that a packed row has space for.
      accepted: Probability that a drafted token is accepted if those before it are; 0 drafts nothing.
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
    together: int = 1
    accepted: float = 0.0


@dataclass(frozen=True)
class Role:
    """Model of the dataflow, and its work in a step.

    Attributes:
      name: Unique name, such as `actor`.
      generates: Whether the role samples the responses.
      passes: Number of forward passes over all responses in the prepare stage.
      trained: Whether the role is updated; it then has gradients and an optimizer.
      tokens_per_microbatch: Number of tokens of a microbatch over all devices, in packed rows of the longest length or
        more; None uses `rows_per_microbatch`, without packing and padding.
      rows_per_microbatch: Number of sequences that one data-parallel replica takes at a time.
      remat: Whether layers are recomputed in the backward pass; None decides by the memory for their activations, and
        recomputes if JAX simulates devices on one processor.
      offloads: Whether inputs of recomputed layers are kept in host memory.
      within_machine: Whether stages and tensor shards of one copy have to be inside a machine.
      lora: Settings of adapters that are trained next to frozen weights in the compute dtype; None trains all weights.
      optimizer_bytes: Bytes of optimizer state per weight; None is `Software.optimizer_bytes`.
      undivided: Parts that devices must not split: `rows` (tokens of a row), and in generation `stage` (layers) and
        `context` (positions of a cache).
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
        """Return the bytes of optimizer state per weight."""
        return software.optimizer_bytes if self.optimizer_bytes is None else self.optimizer_bytes


@dataclass(frozen=True)
class Software:
    """Software properties that neither model nor layout determine. The defaults describe this package in bfloat16.

    Attributes:
      weight_bytes: Bytes of a trained weight in training.
      gradient_bytes: Bytes of a weight's gradient.
      optimizer_bytes: Bytes of optimizer state per weight.
      compute_bytes: Bytes of an activation, a cached key, a frozen weight, or a weight in generation.
      pipeline_parts_per_stage: Number of parts per stage that a microbatch is split into; None runs a pipeline through
        all microbatches of an update (1F1B) before draining it.
      scatters_between_stages: Whether each tensor shard sends only its part of the residual stream to the next stage.
      head_on_last_stage: Whether the first stage alone looks tokens up and the last stage alone computes the logits;
        tables are then gathered like layers.
      unstacks_layers: Whether decoding reads unstacked layers; the stack is deleted, unless it is also trained.
      cache_copies: Largest number of copies of the cache during decoding.
      decode_tokens_per_dispatch: Number of tokens that one program decodes; None counts no program starts, and no
        reads of unused cache capacity.
      reads_responses: Whether logits are computed only for tokens of responses.
      compiler: XLA backend whose extra copies are counted; None counts none. The TPU compiler casts all layer weights
        of a device before the layers run, keeps MLP activations of recomputed layers in float32, and pads the cache of
        each head. If weights are split by width, it also keeps a second copy of a device's shard of a microbatch's
        gradient, in the compute dtype of the gather (gradients of experts in their own dtype). The GPU compiler
        reorders the dimensions of some matrices before the layers run, so that a gather appends: matrices that are
        split along another dimension than the first, which are experts and matrices back to the residual stream.
      pages: Whether the cache is in pages; responses to one prompt share the pages that the prompt fills.
    """

    weight_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    compute_bytes: int = 2
    pipeline_parts_per_stage: int | None = PIPELINE_PARTS_PER_STAGE
    scatters_between_stages: bool = False
    head_on_last_stage: bool = False
    unstacks_layers: bool = True
    cache_copies: float = 1.5
    decode_tokens_per_dispatch: int | None = Rollout.decode_tokens_per_dispatch
    reads_responses: bool = True
    compiler: Literal["gpu", "tpu"] | None = None
    pages: bool = False

    @property
    def trains_in_compute_dtype(self) -> bool:
        """True if generation can use the trained weights directly, without a second copy."""
        return self.weight_bytes == self.compute_bytes

    @property
    def cache_lanes(self) -> int:
        """Multiple that the cached numbers of each head are padded to; 128 in the memory layout of TPUs."""
        return 128 if self.compiler == "tpu" else 1
