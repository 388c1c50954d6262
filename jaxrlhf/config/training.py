"""Layout and training of a role, and the rollout of a step."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from jaxrlhf.config.lora import Lora
from jaxrlhf.config.refusal import Refusal, require
from jaxrlhf.config.serving import RolloutServer
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings, Share, literals, within


@dataclass(frozen=True)
class Layout(Settings):
    """Parallel sizes of a role, for training and for generation.

    Training splits the weights p-t-d ways, generation p_g-t_g ways; the devices left over are replicas. Where p_g
    divides p, t_g divides t and c_g divides `context`, training refines generation: a device's training shard is a
    part of its generation shard, and switching moves the least. Any other pair works too, and moves more.

    Attributes:
      data: d, replicas of the training state; None takes the devices that are left.
      fsdp: Ways that parameters and optimizer are split over data-parallel devices.
      stage: p, pipeline stages in training.
      tensor: t, ways that every layer is split in training.
      generation_stage: p_g, pipeline stages in generation.
      generation_tensor: t_g, ways that every layer is split in generation.
      expert: Ways that the experts of every layer are divided, in training and in generation. The same devices split
        rows and slots, and in training all other weights, as those of `fsdp` do.
      context: Ways that the tokens of a row are split in training (context parallelism). The same devices split
        weights, as those of `fsdp` do; attention exchanges tokens for heads, so there are no more than heads.
      generation_context: c_g, ways that the positions of every sequence's cache are split in generation (decode context
        parallelism). Weights are whole along it: use it where a replica has no room for the cache.

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
            f"Layout.context={self.context} splits the tokens of a row over devices, and stage={self.stage} hands rows "
            "from stage to stage; use one of them, with fsdp or tensor beside it",
        )
        require(
            self.generation_context == 1 or self.generation_stage == 1,
            f"Layout.generation_context={self.generation_context} splits a cache over positions, and "
            f"generation_stage={self.generation_stage} over layers; use one of them, with generation_tensor beside it",
        )

    @property
    def width_shards(self) -> int:
        """Devices that split every layer's weights along their width."""
        return self.fsdp * self.expert * self.context

    @property
    def copy_devices(self) -> int:
        """Devices that one copy of the training state is split over."""
        return self.width_shards * self.stage * self.tensor

    @property
    def replica_devices(self) -> int:
        """Devices that generate together."""
        return self.expert * self.slot_devices

    @property
    def slot_devices(self) -> int:
        """Devices that decode the same sequences."""
        return self.generation_context * self.generation_stage * self.generation_tensor

    @property
    def of_training(self) -> "Layout":
        """The layout of a role that trains alike and generates nothing."""
        return replace(self, generation_context=1, generation_stage=1, generation_tensor=1)

    @property
    def refines(self) -> bool:
        """True if every training shard lies inside a generation shard."""
        pairs = ("context", self.context), ("stage", self.stage), ("tensor", self.tensor)
        return all(size % getattr(self, f"generation_{axis}") == 0 for axis, size in pairs)

    @property
    def micro_context(self) -> int:
        """Generation replicas that the devices of `context` become."""
        self._require_refinement("micro_context")
        return self.context // self.generation_context

    @property
    def micro_stage(self) -> int:
        """p / p_g; times `micro_tensor`, the generation replicas that one training replica becomes."""
        self._require_refinement("micro_stage")
        return self.stage // self.generation_stage

    @property
    def micro_tensor(self) -> int:
        """t / t_g."""
        self._require_refinement("micro_tensor")
        return self.tensor // self.generation_tensor

    def _require_refinement(self, name: str) -> None:
        require(
            self.refines,
            f"Layout.{name} exists where training refines generation; context={self.context}, stage={self.stage}, "
            f"tensor={self.tensor} are not multiples of generation_context={self.generation_context}, "
            f"generation_stage={self.generation_stage}, generation_tensor={self.generation_tensor}",
        )


@dataclass(frozen=True)
class ParameterGroup(Settings):
    """Parameters with a learning rate of their own, or frozen.

    Attributes:
      pattern: Regular expression that is found in the names of those meant, such as `^embed$` or `attention`; one
        that is found in none is answered with all names.
      learning_rate: Peak of their learning rate, with the warm-up and decay of the others; None freezes them.
      layers: First layer of those meant, and the one after the last, as a slice counts; None is all. Parameters that
        are frozen in every layer have no moments; a layer frozen alone still costs its moments and gradient.
    """

    pattern: str = ""
    learning_rate: Finite[Positive[float]] | None = None
    layers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise Refusal(f"ParameterGroup.pattern={self.pattern!r} is no regular expression: {error}") from error


ADAMW = ("beta1", "beta2", "eps", "weight_decay", "state_dtype")
"""Settings of `Optimizer` that AdamW alone reads."""


@dataclass(frozen=True)
class Optimizer(Settings):
    """AdamW, or another optimizer of optax, with global-norm clipping.

    Attributes:
      factory: Function that makes the optimizer, as `module:function`, such as `optax:adafactor` or
        `optax.contrib:muon`; it is given `learning_rate`, the schedule, and `arguments`. None is AdamW with the moments
        and the decay below, which others have in their `arguments`. Muon is told what each matrix sums over; embedding,
        head and vectors it leaves to Adam.
      arguments: Arguments of the factory, each a name and a Python literal such as `consistent_rms=0.2` or `mode='a'`.
      warmup_updates: Updates over which the learning rate rises from 0.
      decay: `constant`, or down to 0 over the run's updates.
      state_dtype: Dtype that AdamW's two moments are kept in; `bfloat16` halves them, rounded up or down at random so
        that small changes are not lost (stochastic rounding).
      max_grad_norm: Gradients are scaled down to this global norm.
      groups: Parameters with learning rates of their own, or frozen; of several that name one the first counts.
      average_decay: Decay of an exponential average of the weights over updates (EMA), kept beside the moments at 4
        bytes a weight, which `export --average` writes; None keeps none.
      vision_learning_rate: Learning rate of a vision tower, with warm-up and decay of the others; None freezes it.
    """

    factory: str | None = None
    arguments: tuple[str, ...] = ()
    learning_rate: Finite[Positive[float]] = 1e-6
    warmup_updates: NotNegative[int] = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    beta1: Share[float] = 0.9
    beta2: Share[float] = 0.999
    eps: Finite[Positive[float]] = 1e-8
    weight_decay: Finite[NotNegative[float]] = 0.01
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    max_grad_norm: Positive[float] = 1.0
    groups: tuple[ParameterGroup, ...] = ()
    average_decay: Share[float] | None = None
    vision_learning_rate: Finite[Positive[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            require(getattr(self, name) < 1, f"Optimizer.{name} must be below 1, got 1: such a moment never moves")
        require(
            self.factory is not None or not self.arguments,
            f"Optimizer.arguments={self.arguments} are those of a factory, and none is given; name it, such as "
            "factory='optax:adafactor'",
        )
        own = [f"{name}={getattr(self, name)}" for name in ADAMW if getattr(self, name) != getattr(Optimizer, name)]
        require(
            self.factory is None or not own,
            f"Optimizer has {', '.join(own)}, which AdamW reads, and factory={self.factory!r}; give arguments instead",
        )
        require(
            "learning_rate" not in self.keywords,
            "Optimizer.arguments has a learning_rate, and the factory is given Optimizer.learning_rate's schedule; "
            "set that",
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """Arguments of the factory by name.

        Raises:
          Refusal: One is no name and literal.
        """
        return literals(self.arguments, "Optimizer.arguments")


Remat = Literal["auto", "full", "offload", "none"]


@dataclass(frozen=True)
class Training(Settings):
    """Training of one role.

    Attributes:
      tokens_per_microbatch: Tokens, padding included, of one forward-backward over all devices of the role, at most.
        Smaller saves memory; the gradient does not change.
      remat: Rematerialisation: in the backward pass `full` computes each layer again from its input, `none` nothing.
        `offload` is `full` with the inputs in host memory meanwhile; on CPU, whose memory is the host's, they stay.
        `auto` is `none` on an accelerator that has the memory by the estimate in the table of derived settings, else
        `full`; on CPU `full` is faster.
      lora: Adapters to train beside frozen weights; None trains the weights.
      router_loss: Coefficient of the load-balancing loss of a mixture of experts, over each response's tokens and with
        the weights of the main loss, or of pairs with equal ones; None takes the checkpoint's own.
    """

    optimizer: Optimizer = field(default_factory=Optimizer)
    layout: Layout = field(default_factory=Layout)
    tokens_per_microbatch: Positive[int] = 16_384
    remat: Remat = "auto"
    lora: Lora | None = None
    router_loss: Finite[NotNegative[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.lora is None or self.optimizer.average_decay is None,
            f"Optimizer.average_decay={self.optimizer.average_decay} averages whole weights, and lora trains adapters "
            "beside them; drop one",
        )
        require(
            self.remat != "offload" or self.layout.stage == 1,
            f"Training.remat='offload' sends the inputs of layers to host memory, and layout.stage={self.layout.stage} "
            "hands them from stage to stage; use remat='full', or fsdp or tensor in place of stages",
        )
        rate, part = self.optimizer.vision_learning_rate, "decoder" if self.lora is None else self.lora.part
        require(
            self.lora is None or (rate is None) == (part == "decoder"),
            f"Lora.part={part!r} and Optimizer.vision_learning_rate={rate}: adapters of a tower learn at that rate, "
            "and beside those of the decoder alone the tower is frozen; give both, or none",
        )


MOST_KEPT = 64
"""Tokens at most that a draw of a training rollout may be among, with `top_k`: each is recorded, at 4 bytes a token."""


@dataclass(frozen=True)
class Sampling(Settings):
    """Sampling of a token. Algorithms with a policy loss refuse `greedy`, and need a `top_k` up to 64 beside `top_p`,
    `min_p` or `min_tokens`: the tokens that each draw is among are then recorded, and the trainer's log-probabilities
    are of the same truncated distribution (keep sampling mask: DeepSeek-V3.2, arXiv:2512.02556).

    Attributes:
      top_p: Nucleus, in (0, 1]; 1 keeps all tokens.
      top_k: Likeliest tokens kept; 0 keeps all.
      min_p: Least probability of a token over that of the likeliest, in [0, 1); 0 keeps all. Of what `top_k` keeps
        `top_p` keeps its part, and of that `min_p`.
      min_tokens: Tokens before the first at which a stop token may be drawn.
      greedy: Take the likeliest token, whatever temperature, top_p and top_k say; `min_tokens` still applies.
      stop_tokens: Texts that end a response beside the tokenizer's EOS, such as `</answer>`; the tokens of a text stay
        in the response, up to the one that completes it.
      ignore_eos: Let no token end a response, so that each runs to its limit: to measure speed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: NotNegative[int] = 0
    min_p: float = 0.0
    min_tokens: NotNegative[int] = 0
    greedy: bool = False
    stop_tokens: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.temperature > 0,
            f"Sampling.temperature must be above 0, got {self.temperature}; for argmax decoding set greedy=True",
        )
        require(0 < self.top_p <= 1, f"Sampling.top_p must be in (0, 1], got {self.top_p}")
        require(0 <= self.min_p < 1, f"Sampling.min_p must be in [0, 1), got {self.min_p}")
        require(
            not (self.ignore_eos and self.stop_tokens),
            f"Sampling.ignore_eos lets no token end a response, and stop_tokens={self.stop_tokens} would; give one",
        )
        require(all(self.stop_tokens), f"Sampling.stop_tokens={self.stop_tokens} has an empty text, which ends nothing")

    @property
    def most_kept(self) -> int:
        """Tokens at most that a draw is among, where they are few enough to record; else 0."""
        return self.top_k if not self.greedy and self.top_k <= MOST_KEPT else 0


@dataclass(frozen=True)
class Rollout(Settings):
    """Generation of one step.

    Attributes:
      prompts_per_step: P.
      responses_per_prompt: G; a step has B = P * G responses.
      max_prompt_tokens: Longest prompt; longer ones are dropped and counted.
      max_response_tokens: Longest response; longer ones are cut and marked truncated.
      slots: Responses decoded at once; None is all of a step's.
      decode_tokens_per_dispatch: Tokens decoded by one program call before finished slots refill.
      replay_routing: Router replay (R3): train each token through the experts that it was sampled with.
      cache: KV cache. `slots` gives every response the capacity of the longest; in `pages` each takes what it needs,
        and responses to one prompt share its pages. `auto` is `pages` where the backend has a kernel that reads them
        (GPU and TPU), else `slots`.
      staleness: Most policy versions, one a step, by which the oldest token of a step may be behind the policy that
        learns from it. 0 generates, then learns. At k each step learns from responses that were begun k steps ago, so
        that generation on a pool of its own goes on while models are updated; `algorithm.correction` weighs them.
      over_provision: Groups of responses under way over those of a step, from 1 to 2. Above 1 a step takes the first
        groups that are complete, and the others go on under the next weights, each put off as often as the staleness
        allows (APRIL: Zhou et al. 2025, arXiv:2509.18521).
      on_new_weights: Keys and values of responses that are put off. They are computed again by the next weights, or
        kept as they are: nothing is computed twice, and tokens attend to what older weights made of those before. Each
        token's recorded log-probability is that of the mixture which drew it, for `algorithm.correction` to weigh.
      order: Clock by which groups are complete first: counts of drawn tokens, so that a run has the same numbers when
        it is repeated or resumed; or arrival, for episodes, whose tools take seconds that nobody can repeat.
      replay_arrivals: The `arrivals.jsonl` of a run with `order="arrival"`, whose groups arrive in the same steps.
      stream_parts: Parts in which a step learns from its groups, those that are complete first by counts of tokens,
        while a pool of its own draws the others with the same weights. They make one update, that of the whole step.
      quantize: Format of the matrices of layers while they generate, rounded in the switch so that fewer bytes move:
        8 bits as integers, or as floats where the chip has those (Hopper, TPU v7). The policy that samples is then not
        the one that is trained, so the algorithm needs a `correction`. None leaves them in the compute dtype.
      server: Servers of another engine that generate in place of the run's own. Their arithmetic is another, so
        `algorithm.correction` weighs their responses.
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
    on_new_weights: Literal["recompute", "keep"] = "recompute"
    order: Literal["deterministic", "arrival"] = "deterministic"
    replay_arrivals: str | None = None
    stream_parts: Positive[int] = 1
    quantize: Literal["int8", "fp8"] | None = None
    server: RolloutServer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.sampling.min_tokens <= self.max_response_tokens,
            f"Sampling.min_tokens={self.sampling.min_tokens} is above max_response_tokens={self.max_response_tokens}",
        )
        require(
            self.server is None or not (self.quantize or self.replay_routing),
            "rollout.server generates with another engine, which rounds weights by settings of its own and records no "
            "experts; drop quantize and replay_routing",
        )

    @property
    def width(self) -> int:
        """T, columns of a rollout's arrays: tokens of the longest prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def groups_under_way(self) -> int:
        """Groups that are generated at once; a step takes `prompts_per_step` of them."""
        return math.ceil(self.prompts_per_step * self.over_provision)
