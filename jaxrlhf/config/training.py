"""Settings of a role's layout and training, and of the rollout of a step."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from jaxrlhf.config.lora import Lora
from jaxrlhf.config.refusal import Refusal, require
from jaxrlhf.config.serving import RolloutServer
from jaxrlhf.config.settings import (
    BelowOne,
    Bound,
    Finite,
    NotNegative,
    Positive,
    Settings,
    Share,
    literals,
    within,
)


@dataclass(frozen=True)
class Layout(Settings):
    """Parallelism of a role, in training and in generation.

    Training splits the weights p-t-d ways, generation p_g-t_g ways; the remaining devices are replicas. If p_g divides
    p, t_g divides t and c_g divides `context`, training refines generation: the training shard of a device is a part of
    its generation shard, and switching between the two layouts moves the least data. Other combinations work too, but
    move more.

    Attributes:
      data: Data parallelism (d): replicas of the training state. None uses all remaining devices.
      fsdp: FSDP size: number of data-parallel devices over which parameters and optimizer state are sharded.
      stage: Pipeline parallelism in training (p): number of stages.
      tensor: Tensor parallelism in training (t): number of shards of every layer.
      generation_stage: Pipeline parallelism in generation (p_g): number of stages.
      generation_tensor: Tensor parallelism in generation (t_g): number of shards of every layer.
      expert: Expert parallelism: number of shards of every layer's experts, in training and in generation. The same
        devices also split rows and slots and, in training, all other weights as `fsdp` does.
      context: Context parallelism in training: number of shards of the tokens of a row, at most the number of heads, as
        attention exchanges tokens for heads. The same devices also split weights as `fsdp` does.
      generation_context: Decode context parallelism (c_g): number of shards of the positions of every sequence's KV
        cache. Weights are replicated over these devices; for caches too large for a generation replica.

    Source: HybridFlow (arXiv:2409.19256), section 5.1; `context`: DeepSpeed Ulysses (arXiv:2309.14509).
    """

    data: Positive[int] | None = None
    fsdp: Positive[int] = 1
    stage: Positive[int] = 1
    tensor: Positive[int] = 1
    generation_stage: Positive[int] = 1
    generation_tensor: Positive[int] = 1
    expert: Positive[int] = 1
    context: Positive[int] = 1
    generation_context: Positive[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.context == 1 or self.stage == 1,
            f"Layout.context={self.context} splits the tokens of a row, but stage={self.stage} needs whole rows; set "
            "context=1 or stage=1, and use fsdp or tensor in addition",
        )
        require(
            self.generation_context == 1 or self.generation_stage == 1,
            f"Layout.generation_context={self.generation_context} and generation_stage={self.generation_stage} both "
            "split a cache; set one of them to 1, and use generation_tensor in addition",
        )

    @property
    def width_shards(self) -> int:
        """Number of devices that split every layer's weights along their width."""
        return self.fsdp * self.expert * self.context

    @property
    def copy_devices(self) -> int:
        """Number of devices over which one copy of the training state is split."""
        return self.width_shards * self.stage * self.tensor

    @property
    def replica_devices(self) -> int:
        """Number of devices of one generation replica."""
        return self.expert * self.slot_devices

    @property
    def slot_devices(self) -> int:
        """Number of devices that decode the same sequences."""
        return self.generation_context * self.generation_stage * self.generation_tensor

    @property
    def of_training(self) -> "Layout":
        """Layout of a role with the same training parallelism that generates nothing."""
        return replace(self, generation_context=1, generation_stage=1, generation_tensor=1)

    @property
    def refines(self) -> bool:
        """True if every training shard is part of a generation shard."""
        pairs = ("context", self.context), ("stage", self.stage), ("tensor", self.tensor)
        return all(size % getattr(self, f"generation_{axis}") == 0 for axis, size in pairs)

    @property
    def micro_context(self) -> int:
        """Number of generation replicas that the devices of `context` form, if training refines generation."""
        return self.context // self.generation_context

    @property
    def micro_stage(self) -> int:
        """p / p_g. One training replica that refines generation forms `micro_stage * micro_tensor` replicas of it."""
        return self.stage // self.generation_stage

    @property
    def micro_tensor(self) -> int:
        """t / t_g; see `micro_stage`."""
        return self.tensor // self.generation_tensor


@dataclass(frozen=True)
class ParameterGroup(Settings):
    """Group of parameters with their own learning rate, or frozen.

    Attributes:
      pattern: Regular expression searched for in parameter names, such as `^embed$` or `attention`. A pattern that
        matches no name is an error that lists all names.
      learning_rate: Peak learning rate of the group, with the warm-up and decay of the other parameters; None freezes
        the group.
      layers: First layer of the group and the layer after the last, like a Python slice; None is all layers. Parameters
        frozen in every layer have no optimizer moments; a layer frozen alone still costs its moments and gradient.
    """

    pattern: str = ""
    learning_rate: Finite[Positive[float]] | None = None
    layers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise Refusal(f"ParameterGroup.pattern={self.pattern!r} is not a regular expression: {error}") from error


ADAMW = ("beta1", "beta2", "eps", "weight_decay", "state_dtype")
"""Fields of `Optimizer` that only AdamW reads."""


@dataclass(frozen=True)
class Optimizer(Settings):
    """AdamW or another optax optimizer, with clipping of the global gradient norm.

    Attributes:
      factory: Function that makes the optimizer, as `module:function`, such as `optax:adafactor` or
        `optax.contrib:muon`. It is called with `learning_rate`, a schedule, and with `arguments`. None is AdamW with
        the moments and weight decay of these settings; other optimizers take theirs in `arguments`. Muon also gets the
        input dimensions of each matrix, and leaves embedding, head and vectors to Adam.
      arguments: Arguments of the factory, each a name and a Python literal such as `consistent_rms=0.2` or `mode='a'`.
      warmup_updates: Number of updates over which the learning rate rises from 0.
      decay: Learning rate after the warm-up: `constant`, or falling to 0 over the updates of the run.
      state_dtype: Dtype of AdamW's two moments. `bfloat16` halves their memory; values are rounded up or down at random
        (stochastic rounding), so that small changes are not lost.
      max_grad_norm: Largest global gradient norm; larger gradients are scaled down to it.
      groups: Parameter groups with their own learning rate, or frozen. If several groups match a parameter, the first
        counts.
      average_decay: Decay per update of an exponential moving average (EMA) of the weights, stored at 4 bytes per
        weight and written by `export --average`. None keeps no average.
      vision_learning_rate: Peak learning rate of a vision tower, with the warm-up and decay of the other parameters;
        None freezes the tower.
    """

    factory: str | None = None
    arguments: tuple[str, ...] = ()
    learning_rate: Finite[Positive[float]] = 1e-6
    warmup_updates: NotNegative[int] = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    beta1: BelowOne[float] = 0.9
    beta2: BelowOne[float] = 0.999
    eps: Finite[Positive[float]] = 1e-8
    weight_decay: Finite[NotNegative[float]] = 0.01
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    max_grad_norm: Positive[float] = 1.0
    groups: tuple[ParameterGroup, ...] = ()
    average_decay: Share[float] | None = None
    vision_learning_rate: Finite[Positive[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.factory is not None or not self.arguments,
            f"Optimizer.arguments={self.arguments} require a factory, but factory is None; set one, such as "
            "factory='optax:adafactor'",
        )
        own = [f"{name}={getattr(self, name)}" for name in ADAMW if getattr(self, name) != getattr(Optimizer, name)]
        require(
            self.factory is None or not own,
            f"Optimizer has {', '.join(own)}, which only AdamW reads, but factory={self.factory!r}; use arguments",
        )
        require(
            "learning_rate" not in self.keywords,
            "Optimizer.arguments has learning_rate, but the factory gets Optimizer.learning_rate's schedule; set "
            "Optimizer.learning_rate instead",
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """Arguments of the factory, by name.

        Raises:
          Refusal: An argument is not a name and a Python literal.
        """
        return literals(self.arguments, "Optimizer.arguments")


Remat = Literal["auto", "full", "offload", "none"]


@dataclass(frozen=True)
class Training(Settings):
    """Training settings of one role.

    Attributes:
      tokens_per_microbatch: Largest number of tokens, padding included, in one forward-backward pass over all devices
        of the role. Smaller microbatches save memory; the gradient does not change.
      remat: Rematerialization: `full` recomputes each layer from its input in the backward pass, `none` recomputes
        nothing. `offload` is `full` with the layer inputs in host memory meanwhile (on CPU they stay in place). `auto`
        is `none` on an accelerator with enough memory by the estimate in the table of derived settings, else `full`; on
        CPU `full` is faster.
      lora: LoRA adapters to train next to frozen weights; None trains the weights.
      router_loss: Coefficient of the load-balancing loss of a mixture of experts, over the tokens of each response,
        weighted as in the main loss (equally for preference pairs). None uses the coefficient of the checkpoint.
      mtp_loss: Coefficient of the loss of the layer that predicts the second next token (`Pretrained.mtp`): the
        negative log-probability of response tokens, weighted likewise. It trains this layer alone. None is 0.1 if the
        model has the layer, as late in DeepSeek-V3's pre-training (arXiv:2412.19437, section 4.2); 0 is no gradient.
    """

    optimizer: Optimizer = field(default_factory=Optimizer)
    layout: Layout = field(default_factory=Layout)
    tokens_per_microbatch: Positive[int] = 16_384
    remat: Remat = "auto"
    lora: Lora | None = None
    router_loss: Finite[NotNegative[float]] | None = None
    mtp_loss: Finite[NotNegative[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.lora is None or self.optimizer.average_decay is None,
            f"Optimizer.average_decay={self.optimizer.average_decay} averages whole weights, but lora trains only "
            "adapters; set average_decay=None, or lora=None",
        )
        require(
            self.remat != "offload" or self.layout.stage == 1,
            f"Training.remat='offload' does not support pipeline stages, got layout.stage={self.layout.stage}; set "
            "remat='full', or use fsdp or tensor instead of stage",
        )
        rate, part = self.optimizer.vision_learning_rate, "decoder" if self.lora is None else self.lora.part
        require(
            self.lora is None or (rate is None) == (part == "decoder"),
            f"Lora.part={part!r}, but Optimizer.vision_learning_rate={rate}; part='tower' and part='both' require a "
            "vision_learning_rate, part='decoder' requires None; change one of them",
        )


MOST_KEPT = 64
"""Largest `top_k` of a training rollout with truncated sampling; each token's candidates are recorded, 4 bytes each."""


@dataclass(frozen=True)
class Sampling(Settings):
    """Sampling of tokens.

    Algorithms with a policy loss refuse `greedy`, and take `top_p`, `min_p` or `min_tokens` only with a `top_k` from 1
    to 64. The candidates of each sampled token are then recorded, and the trainer normalizes log-probabilities over the
    same candidates (keep sampling mask: DeepSeek-V3.2, arXiv:2512.02556).

    Attributes:
      top_p: Nucleus sampling: probability mass that is kept, in (0, 1]; 1 keeps all tokens.
      top_k: Number of most likely tokens that are kept; 0 keeps all.
      min_p: Smallest kept probability, as a fraction of the most likely token's, in [0, 1); 0 keeps all. `top_k` is
        applied first, then `top_p`, then `min_p`.
      min_tokens: Smallest number of tokens before a stop token may be sampled.
      greedy: True takes the most likely token and ignores temperature, top_p and top_k; `min_tokens` still applies.
      stop_tokens: Texts that end a response in addition to the tokenizer's EOS, such as `</answer>`. The tokens of the
        text stay in the response, up to the token that completes it.
      ignore_eos: True lets no token end a response, so that each reaches its token limit; for measuring speed.
    """

    temperature: Annotated[float, Bound(lambda value: value > 0, "above 0 (greedy=True is argmax decoding)")] = 1.0
    top_p: Annotated[float, Bound(lambda value: 0 < value <= 1, "in (0, 1]")] = 1.0
    top_k: NotNegative[int] = 0
    min_p: BelowOne[float] = 0.0
    min_tokens: NotNegative[int] = 0
    greedy: bool = False
    stop_tokens: Annotated[tuple[str, ...], Bound(all, "texts that are not empty", tuple)] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.ignore_eos and self.stop_tokens),
            f"Sampling.ignore_eos=True cannot be combined with stop_tokens={self.stop_tokens}; set only one",
        )

    @property
    def most_kept(self) -> int:
        """Largest number of tokens that a sample is chosen from, if small enough to record; else 0."""
        return self.top_k if not self.greedy and self.top_k <= MOST_KEPT else 0


@dataclass(frozen=True)
class Rollout(Settings):
    """Generation of the responses of one step.

    Attributes:
      prompts_per_step: Number of prompts in a step (P).
      responses_per_prompt: Group size (G): responses to each prompt. A step has B = P * G responses.
      max_prompt_tokens: Longest prompt in tokens; longer prompts are dropped and counted.
      max_response_tokens: Longest response in tokens; longer responses are cut off and marked as truncated.
      slots: Number of responses decoded at once; None is all responses of a step.
      decode_tokens_per_dispatch: Tokens decoded by one program call before finished slots are refilled.
      replay_routing: True trains each token through the experts that it was sampled with (router replay, R3).
      cache: KV cache. `slots` reserves the capacity of the longest response for every response. In `pages` each
        response takes the pages it needs, and responses to one prompt share its pages. `auto` is `pages` if the backend
        has an attention kernel for them (GPU and TPU), else `slots`.
      staleness: Largest number of policy versions, one per step, between the policy that sampled a step's oldest token
        and the policy that learns from it. 0 generates, then learns. With k, a step learns from responses started k
        steps ago, so that generation on its own pool continues during updates; `algorithm.correction` corrects for the
        difference.
      over_provision: Number of groups generated at once, relative to the groups of a step, from 1 to 2. Above 1 a step
        takes the groups that complete first; the others continue with the next weights, as often as the staleness
        allows (APRIL: Zhou et al. 2025, arXiv:2509.18521).
      order: Order in which groups count as complete. `deterministic` counts sampled tokens, so that a repeated or
        resumed run has the same numbers. `arrival` goes by time, for episodes with tools, and is not reproducible.
      quantize: Format of the layers' matrices during generation: 8-bit integers (`int8`), or 8-bit floats on chips that
        have them (`fp8`; Ada, Hopper, TPU v7). Rounding precedes the switch to the generation layout, so fewer bytes
        move. The sampling policy then differs from the trained policy, so the algorithm needs a `correction`. None
        keeps the compute dtype.
      server: Servers of another inference engine that generate in place of the built-in engine. Their arithmetic
        differs, so `algorithm.correction` corrects their responses.
      speculation: `auto` verifies drafts, several tokens in one forward pass, where this is faster: few responses, and
        texts that repeat. Sampled tokens stay the same. None samples one token in each forward pass.
    """

    prompts_per_step: Positive[int] = 64
    responses_per_prompt: Positive[int] = 1
    max_prompt_tokens: Positive[int] = 512
    max_response_tokens: Positive[int] = 512
    sampling: Sampling = field(default_factory=Sampling)
    slots: Positive[int] | None = None
    decode_tokens_per_dispatch: Positive[int] = 16
    replay_routing: bool = False
    cache: Literal["auto", "slots", "pages"] = "auto"
    staleness: NotNegative[int] = 0
    over_provision: Annotated[float, within(1.0, 2.0)] = 1.0
    order: Literal["deterministic", "arrival"] = "deterministic"
    quantize: Literal["int8", "fp8"] | None = None
    server: RolloutServer | None = None
    speculation: Literal["auto"] | None = None

    removed: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "on_new_weights": "keys and values are always computed again with the new weights; remove the setting",
            "stream_parts": "set staleness=1, which overlaps generation and learning",
            "replay_arrivals": "runs with order='arrival' cannot be repeated; set order='deterministic'",
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.sampling.min_tokens <= self.max_response_tokens,
            f"Sampling.min_tokens={self.sampling.min_tokens} is above max_response_tokens={self.max_response_tokens}",
        )
        require(
            self.server is None or not self.quantize,
            f"rollout.server does not support quantize={self.quantize!r}: another engine has its own quantization; set "
            "quantize=None",
        )

    @property
    def width(self) -> int:
        """T, number of columns of a rollout's arrays: tokens of the longest prompt plus the longest response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def groups_in_flight(self) -> int:
        """Number of groups that are generated at once; a step takes `prompts_per_step` of them."""
        return math.ceil(self.prompts_per_step * self.over_provision)
