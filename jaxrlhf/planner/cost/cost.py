"""Cost model: seconds of a model's work in a step, predicted from its shape, its layout and the hardware.

Training and forward passes are bound by matrix products, decoding by reading weights and cache. Collectives, idle
pipeline stages and the start of programs are added. Every function returns the seconds of one device; all devices of a
pool do the same work.

Source: HybridFlow (arXiv:2409.19256), section 6 and appendix C; sources of formulas are given at the formulas.
"""

import math
from dataclasses import dataclass, replace

from jaxrlhf.config import Layout
from jaxrlhf.engine.buckets import cache_capacities
from jaxrlhf.engine.prefill import PREFILL_TOKENS
from jaxrlhf.engine.speculation.choice import MOST_TOKENS, MOST_TOKENS_ELSEWHERE, WIDTHS
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.lora.quantized import Format
from jaxrlhf.models.memory import adapters_held, weights_held
from jaxrlhf.planner.cost.batches import Batch, batch_of, shards_of
from jaxrlhf.planner.cost.collectives import DeviceGroup, all_reduce_s, bytes_per_s, latency_s, send_s
from jaxrlhf.planner.cost.exchanges import (
    exchanged_of,
    experts_exchange_s,
    gather_s,
    heads_exchange_s,
    lookup_s,
    mixed_width,
    parts_gather_s,
)
from jaxrlhf.planner.cost.memory import (
    bytes_per_weight,
    cache_bytes_per_token,
    kept_tokens,
    weights_generating,
    weights_trained,
)
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Cost
from jaxrlhf.planner.workload import Role, Software, Workload


def layer_flops(model: ModelConfig, *, tokens: float, context: float) -> float:
    """Return the FLOPs of one layer's forward pass, averaged over the layers; a token attends to `context` positions.

        2 (attention + mlp weights that a token uses) + 4 N H context, per token

    Source: Kaplan et al. 2020 (arXiv:2001.08361), table 1; grouped queries do not change the scores' cost.
    """
    routed = None if model.experts is None else model.experts.per_token
    value_dim = model.mean_head_dim if model.latent is None else model.latent.value_dim
    scored = 2 * model.num_heads * (model.mean_head_dim + value_dim) * context
    if model.linear is not None:  # in linear attention each value head reads and writes its matrix, for any context
        linear, share = model.linear, model.attention_layers / model.num_layers
        stepped = 6 * linear.value_heads * linear.key_dim * linear.value_dim * (context > 0)
        scored = share * scored + (1 - share) * stepped
    return tokens * (2 * weight_counts(model).layers_with(routed) / model.num_layers + scored)


def head_flops(model: ModelConfig, head: Head, *, tokens: float) -> float:
    """Return the FLOPs of the head's forward pass."""
    return 2 * tokens * weight_counts(model, head).head


def forward_cost(role: Role, layout: Layout, workload: Workload, software: Software, hardware: Hardware) -> Cost:
    """Return the cost of one forward pass over all responses."""
    batch = batch_of(role, layout, workload.responses, workload, software)
    return _pass(role, layout, batch, software, hardware, backward=False) * batch.microbatches


def update_cost(role: Role, layout: Layout, workload: Workload, software: Software, hardware: Hardware) -> Cost:
    """Return the cost of all updates of one step: forward, backward, gradient sums and optimizer.

    A backward pass costs two forward passes, and one more of the layers if they are recomputed. Gradients are summed
    over `data` by all-reduce, over `fsdp` by reduce-scatter. If adapters are trained, the backward pass of products
    with frozen weights costs one forward pass, because only activations have gradients. Gradients of adapters are
    summed over all data-parallel devices.

    Source: Narayanan et al. 2021 (arXiv:2104.04473), sections 2 and 3 and appendix; Rajbhandari et al. 2020 (ZeRO,
    arXiv:1910.02054), section 7.
    """
    responses = workload.responses * workload.epochs / workload.updates
    batch = batch_of(role, layout, responses, workload, software)
    passes = _pass(role, layout, batch, software, hardware, backward=True) * batch.microbatches
    held = weights_trained(role.model, role.head, role.lora, layout)
    shard = layout.stage * layout.tensor
    # Gradients of weights that are split both by width and by stage or tensor are summed in each microbatch.
    sums = batch.microbatches if layout.width_shards > 1 and shard > 1 else 1
    data = DeviceGroup(shards_of(layout) * layout.context, shard)
    if role.lora is None:
        data = DeviceGroup(shards_of(layout) // (layout.fsdp * layout.expert), layout.copy_devices)
    reduced = sums * all_reduce_s(held * software.gradient_bytes, data, hardware)
    # The optimizer reads the gradient, and reads and writes weights and moments.
    kept = software.weight_bytes + role.optimizer_bytes_with(software)
    touched = held * (software.gradient_bytes + 2 * kept)
    # Adding a microbatch's gradient reads two and writes one.
    touched += batch.microbatches * held * 3 * software.gradient_bytes
    optimizer = touched / hardware.reached_bytes_per_s
    if role.remat and role.offloads:  # to the host and back in each microbatch, assuming no overlap with compute
        kept = role.model.stream_width + mixed_width(role.model, layout) * batch.shares
        passes += offload_cost(
            batch.microbatches * batch.tokens * role.model.num_layers * kept * software.compute_bytes, hardware
        )
    step = Cost(memory_s=optimizer, collective_s=reduced, overhead_s=hardware.dispatch_overhead_s)
    return (passes + step) * workload.updates


def _pass(role: Role, layout: Layout, batch: Batch, software: Software, hardware: Hardware, *, backward: bool) -> Cost:
    """Return the cost of one microbatch, forward or forward and backward."""
    assert role.remat is not None, "the simulator sets remat first"
    model, stages, tensor = role.model, layout.stage, layout.tensor
    context = batch.row_tokens / 2  # attention skips scores that the causal mask hides
    # Products count in forward passes. Products with frozen weights count one less, because these have no gradient.
    frozen = backward and role.lora is not None
    passes = 1 if not backward else 3 + role.remat
    head_passes = 1 if not backward else 3 + (role.head == "lm")  # chunks of logits are computed again
    head_passes -= frozen and role.head == "lm"
    attention = layer_flops(model, tokens=batch.attended_tokens, context=context)
    attention -= layer_flops(model, tokens=batch.attended_tokens, context=0)
    if layout.context > 1:  # padding heads are computed too
        attention *= exchanged_of(model, layout).heads * tensor / model.num_heads
    if role.lora is not None:
        attention += 2 * batch.tokens * adapters_held(model, role.lora, Layout(1)) / model.num_layers
    layer = layer_flops(model, tokens=batch.tokens, context=0)
    layers = model.num_layers * ((passes - frozen) * layer + passes * attention)
    # A head with one output is computed for all tokens.
    read_tokens = batch.read_tokens if role.head == "lm" else batch.tokens
    head = head_passes * head_flops(model, role.head, tokens=read_tokens)
    layers_s, head_s = (flops / (stages * tensor) / hardware.reached_flops_per_s for flops in (layers, head))

    part_tokens = batch.tokens / batch.parts
    part_bytes = part_tokens * model.hidden_size * software.compute_bytes
    # Two all-reduces per layer, after attention and after the MLP, in each pass over the layer.
    reduces = 2 * (1 if not backward else 2 + role.remat) * model.num_layers / stages * batch.parts
    tensor_s = reduces * all_reduce_s(part_bytes, DeviceGroup(tensor, 1), hardware)

    # At each of parts + stages - 1 ticks every stage works on a part or is idle.
    ticks = batch.parts + stages - 1
    sent = part_bytes / tensor if software.scatters_between_stages else part_bytes
    stage_s = (1 + backward) * ticks * send_s(sent, DeviceGroup(stages, tensor), hardware)
    if not software.head_on_last_stage:
        # The head is split over stages too, so every stage needs the output of the last stage.
        whole_bytes = batch.tokens * model.hidden_size * software.compute_bytes
        stage_s += (1 + backward) * all_reduce_s(whole_bytes, DeviceGroup(stages, tensor), hardware)

    gathers = ticks if stages > 1 else 1  # number of gathers; gradients are scattered as often
    shard_s = gathers * gather_s(role, layout, software, hardware, backward=backward)
    shard_s += lookup_s(layout, part_bytes * batch.parts, software, hardware, backward=backward)
    # Tokens are gathered and results scattered. The backward pass moves their gradients the other way, and gathers
    # tokens again if layers are recomputed.
    exchanges = (2 if not backward else 4 + role.remat) * _mixtures(model) / stages * batch.parts
    expert_s = exchanges * experts_exchange_s(model, layout, stages * tensor, part_tokens, software, hardware)

    exchanges = (1 if not backward else 2 + role.remat) * model.num_layers
    heads_s = exchanges * heads_exchange_s(model, layout, batch.tokens, software, hardware)

    runs = passes * model.num_layers / stages * batch.parts
    overhead = runs * hardware.layer_overhead_s + hardware.dispatch_overhead_s
    busy = layers_s + tensor_s + runs * hardware.layer_overhead_s
    idle = busy * (stages - 1) / batch.parts  # Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1
    if software.head_on_last_stage:
        idle += head_s * (stages - 1)  # other stages wait for the last stage at every part
    collective = tensor_s + stage_s + shard_s + expert_s + heads_s
    return Cost(compute_s=layers_s + head_s, collective_s=collective, idle_s=idle, overhead_s=overhead)


def _mixtures(model: ModelConfig) -> int:
    """Return the number of layers with experts."""
    return 0 if model.experts is None else model.routed_choices[0]


@dataclass(frozen=True)
class Decoding:
    """Rounds of generation that fit into memory: each of `replicas` decodes `at_once` responses, `waves` times."""

    waves: int
    at_once: int
    replicas: int


def decoding(layout: Layout, devices: int, fit: int, workload: Workload) -> Decoding:
    """Spread the responses of a step over replicas and rounds.

    Args:
      fit: Number of responses of the longest length that fit into a replica's cache.
    """
    replicas = devices // layout.slot_devices
    each = math.ceil(workload.responses / replicas)
    at_once = min(each, fit)
    if workload.slots is not None:
        at_once = min(at_once, math.ceil(workload.slots / replicas))
    waves = math.ceil(each / at_once)
    return Decoding(waves, math.ceil(each / waves), replicas)


def generation_cost(
    model: ModelConfig, layout: Layout, how: Decoding, workload: Workload, software: Software, hardware: Hardware
) -> Cost:
    """Return the cost of generating all responses of a step: prefill each prompt once, then decode token by token.

    Each decode step reads the weights, and the cache of every unfinished response. Products with weights take the
    longer of reading and multiplying. A wave has as many decode steps as the mean response has tokens; the last wave
    has as many as the longest response. Stages work one after another.

    Source: Pope et al. 2022 (arXiv:2211.05102), sections 2 and 3.
    """
    arguments = (model, layout, how, workload, software, hardware)
    return prefill_cost(*arguments) + decode_cost(*arguments)


def prefill_cost(
    model: ModelConfig, layout: Layout, how: Decoding, workload: Workload, software: Software, hardware: Hardware
) -> Cost:
    """Return the cost of prefilling each distinct prompt once."""
    stages, tensor = layout.generation_stage, layout.generation_tensor
    prompts = math.ceil(workload.prompts / how.replicas)
    tokens = prompts * workload.prompt_tokens
    context = workload.prompt_tokens / 2
    chunked = workload.prompt_tokens > PREFILL_TOKENS  # devices share the positions before a chunk
    context /= layout.generation_context if chunked else 1
    flops = model.num_layers * layer_flops(model, tokens=tokens, context=context)
    # Stages work one after another: the time is as long as if each device ran all layers.
    compute = flops / tensor / hardware.reached_flops_per_s
    sent = tokens * model.hidden_size * software.compute_bytes
    collective = 2 * model.num_layers * all_reduce_s(sent, DeviceGroup(tensor, 1), hardware)
    collective += 2 * _mixtures(model) * experts_exchange_s(model, layout, stages * tensor, tokens, software, hardware)
    collective += chunked * model.attention_layers * parts_gather_s(model, layout, tokens, hardware)
    overhead = model.num_layers * hardware.layer_overhead_s * how.waves
    return Cost(compute / stages, 0.0, collective, compute * (stages - 1) / stages, 0.0, overhead)


def decode_cost(
    model: ModelConfig, layout: Layout, how: Decoding, workload: Workload, software: Software, hardware: Hardware
) -> Cost:
    """Return the cost of decoding all responses. More memory for the cache never increases the cost.

    With drafts, a pass runs several tokens of each response and gains those accepted, where this is faster.
    """
    stages, tensor, each_bytes = layout.generation_stage, layout.generation_tensor, software.compute_bytes
    each = math.ceil(workload.responses / how.replicas)
    tokens = each * workload.response_tokens
    (width, gained), (last_width, last_gained) = (
        _of_pass(workload, count, hardware) for count in (each / how.waves, 1)
    )
    full_steps = how.waves * workload.response_tokens / gained
    last_steps = (workload.longest_tokens - workload.prompt_tokens - workload.response_tokens) / last_gained
    run = tokens * width / gained  # tokens that passes run, the rejected included
    steps = full_steps + last_steps

    routed = None if model.experts is None else model.experts.per_token
    weights = weight_counts(model)
    compute = 2 * run * (weights.layers_with(routed) + weights.head) / tensor / hardware.reached_flops_per_s
    read = full_steps * _weights_read(model, layout, width * each / how.waves)
    read += last_steps * _weights_read(model, layout, last_width)
    weights_s = read * each_bytes / tensor / hardware.reached_bytes_per_s

    exact, context = software.decode_tokens_per_dispatch is None, workload.prompt_tokens + workload.response_tokens / 2
    context = context if exact else _capacity_read(workload)
    context = kept_tokens(model, layout, context, workload, software)
    per_token = stages * cache_bytes_per_token(model, layout, itemsize=each_bytes, lanes=software.cache_lanes)
    state = 2 * model.state_bytes / tensor  # read and written at every token
    cache = tokens / gained * (context * per_token + state) / hardware.reached_bytes_per_s

    # Two all-reduces per layer in each step; over all steps they send the activations of all tokens.
    group, sent = DeviceGroup(tensor, 1), run * model.hidden_size * each_bytes
    waiting = all_reduce_s(0.0, group, hardware)
    collective = 2 * model.num_layers * (all_reduce_s(sent, group, hardware) + (steps - 1) * waiting)
    pipeline = DeviceGroup(stages, tensor)
    waiting = send_s(0.0, pipeline, hardware)
    collective += (stages - 1) * (send_s(sent, pipeline, hardware) + (steps - 1) * waiting)
    exchanged, waiting = (
        experts_exchange_s(model, layout, stages * tensor, count, software, hardware) for count in (run, 0.0)
    )
    collective += 2 * _mixtures(model) * (exchanged + (steps - 1) * waiting)
    gathered, waiting = (parts_gather_s(model, layout, count, hardware) for count in (run, 0.0))
    collective += model.attention_layers * (gathered + (steps - 1) * waiting)
    dispatch_s = hardware.dispatch_overhead_s / (software.decode_tokens_per_dispatch or math.inf)
    cost = Cost(
        compute_s=compute / stages,
        memory_s=(max(0.0, weights_s - compute) + cache) / stages,
        collective_s=collective,
        idle_s=(max(compute, weights_s) + cache) * (1 - 1 / stages),
        overhead_s=steps * (model.num_layers * hardware.layer_overhead_s + dispatch_s),
    )
    if not workload.accepted:
        return cost
    plain = decode_cost(model, layout, how, replace(workload, accepted=0.0), software, hardware)
    return min(plain, cost, key=lambda either: either.seconds)


def _of_pass(workload: Workload, responses: float, hardware: Hardware) -> tuple[int, float]:
    """Return how many tokens a pass runs for each of a replica's responses, and how many each response gains."""
    most = MOST_TOKENS["cpu"] if hardware.shared_compute else MOST_TOKENS_ELSEWHERE
    if not workload.accepted or responses * WIDTHS[0] > most:
        return 1, 1.0
    return WIDTHS[0], sum(workload.accepted**place for place in range(WIDTHS[0]))


def _capacity_read(workload: Workload) -> float:
    """Return the mean number of positions that a token reads: at position s the smallest capacity that holds s."""
    start, end = workload.prompt_tokens, workload.prompt_tokens + workload.response_tokens
    read, before = 0.0, 0.0
    for capacity in cache_capacities(workload.longest_tokens):
        read += capacity * max(0.0, min(end, capacity) - max(start, before))
        before = capacity
    return read / workload.response_tokens


def _weights_read(model: ModelConfig, layout: Layout, tokens: float) -> float:
    """Return the number of weights that a decode step reads, with `tokens` responses on each expert shard."""
    experts, weights = experts_read(model, tokens * layout.expert), weight_counts(model)
    return weights.layers_with(None if experts is None else experts / layout.expert) + weights.head


def experts_read(model: ModelConfig, tokens: float) -> float | None:
    """Return the expected number of experts used by at least one of `tokens` tokens if routed evenly; None if dense."""
    if model.experts is None:
        return None
    missed = (1 - model.experts.per_token / model.experts.count) ** tokens
    return model.experts.count * (1 - missed)


def switch_bytes(model: ModelConfig, layout: Layout, *, itemsize: float) -> float:
    """Return the bytes that each device receives in the switch from training to generation.

        M (1 / (p_g t_g) - 1 / (p t fsdp))

    If training splits weights and does not refine generation, a device is assumed to hold none of its weights yet.

    Source: HybridFlow, table 2.
    """
    wanted, held = weights_generating(model, layout), weights_held(model, "lm", layout)
    whole = layout.copy_devices == 1
    return max(0.0, wanted - (held if layout.refines or whole else 0.0)) * itemsize


def switch_cost(
    model: ModelConfig, layout: Layout, software: Software, hardware: Hardware, *, quantize: Format | None = None
) -> Cost:
    """Return the cost of resharding from the training to the generation layout; the way back is a local slice.

    A generation shard is gathered from the devices that hold its parts. The switch may take several gathers; all are
    counted at the rate of the slowest gather, among the devices farthest apart.
    """
    each = bytes_per_weight(model, None, itemsize=software.compute_bytes, quantize=quantize)
    received = switch_bytes(model, layout, itemsize=each)
    if received == 0:
        return Cost()
    group = _gathering(layout)
    seconds = received / bytes_per_s(group, hardware) + (group.size - 1) * latency_s(group, hardware)
    return Cost(collective_s=seconds, overhead_s=hardware.dispatch_overhead_s)


def _gathering(layout: Layout) -> DeviceGroup:
    """Return the group of devices farthest apart that a generation shard is gathered from."""
    if layout.width_shards > 1:
        return DeviceGroup(layout.width_shards, layout.stage * layout.tensor)
    if not layout.refines:
        return DeviceGroup(layout.stage * layout.tensor, 1)
    return (
        DeviceGroup(layout.micro_stage, layout.tensor)
        if layout.micro_stage > 1
        else DeviceGroup(layout.micro_tensor, 1)
    )


def move_cost(
    model: ModelConfig, source: int, layout: Layout, devices: int, software: Software, hardware: Hardware
) -> Cost:
    """Return the cost of sending weights from `source` devices, the actor's pool, to `devices` devices that generate.

    t = max(total bytes sent / source devices, bytes that one target receives) / bandwidth
    """
    each = weights_generating(model, layout) * software.compute_bytes
    busiest = max(each * devices / source, each)
    near = source + devices <= hardware.devices_per_machine
    rate = (hardware.link_bytes_per_s if near else hardware.network_bytes_per_s) * hardware.link_efficiency
    latency = hardware.link_latency_s if near else hardware.network_latency_s
    return Cost(collective_s=busiest / rate + latency, overhead_s=hardware.dispatch_overhead_s)


def offload_cost(num_bytes: float, hardware: Hardware) -> Cost:
    """Return the cost of moving `num_bytes` from host memory to the device and back."""
    return Cost(host_s=2 * num_bytes / hardware.host_bytes_per_s)
