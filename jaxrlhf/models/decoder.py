"""Forward passes of the decoder: over packed rows, over prompts (prefill), or over few tokens per slot (decode).

Parameters are float32 masters, or the generation copy in its own dtype. Each matrix is cast to the activation dtype
where it is used, so that gathers of sharded weights move the smaller dtype.
Norms, rotary positions and softmax always compute in float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jaxrlhf.batch import Array, Params
from jaxrlhf.models.attention.attention import Segments
from jaxrlhf.models.attention.chunks import Chunk, write_chunk
from jaxrlhf.models.attention.interleaved import resized
from jaxrlhf.models.attention.kv_cache import Cache, Prefix, capacity_of, empty_prefix
from jaxrlhf.models.attention.linear_attention import LayerState
from jaxrlhf.models.attention.mask import AttentionMask
from jaxrlhf.models.attention.rings import NOWHERE
from jaxrlhf.models.causal_lm import causal_lm_method
from jaxrlhf.models.config import DENSE_LAYERS, LENDERS, SLIDING_LAYERS, STACKS, ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.layer import layer_rows, layer_slots
from jaxrlhf.models.moe.experts import NO_ROUTER_INPUTS, RouterInputs, RouterOutputs
from jaxrlhf.models.mtp.layer import next_of_prompts, with_mtp
from jaxrlhf.models.norm import norm
from jaxrlhf.models.pipeline import pipeline_decode, pipeline_forward
from jaxrlhf.models.residual.embedding import embedded
from jaxrlhf.models.residual.layer_inputs import layer_inputs
from jaxrlhf.models.residual.streams import make_streams, merge_streams
from jaxrlhf.models.rope import rotations
from jaxrlhf.models.stack import (
    Flow,
    Layers,
    cache_places,
    nothing_lent,
    rematerialised,
    run_layers,
    split_by_stack,
    stacks,
)
from jaxrlhf.models.vision.rows import ImageRows
from jaxrlhf.models.vision.tower import ImageFeatures, run_tower


class HiddenStates(NamedTuple):
    """Hidden states after the final norm.

    Attributes:
      hidden_RWD: Hidden state of every token of every packed row.
      router: Choices and losses of the routers, `[L, ...]` over the layers with experts; None for a dense model.
    """

    hidden_RWD: Array
    router: RouterOutputs | None = None


class PrefillOutput(NamedTuple):
    """Result of `prefill`.

    Attributes:
      hidden_PD: Hidden state of each prompt's last token after the final norm, which predicts the next token.
      prefix: Keys and values to insert into a cache; entries past a prompt's length are meaningless.
      choice_PSLk: int16, ids of the experts chosen for each token; None for a dense model.
    """

    hidden_PD: Array
    prefix: Prefix
    choice_PSLk: Array | None = None


class Past(NamedTuple):
    """Prompt beginnings that are already computed, from which `prefill` continues.

    Attributes:
      prefix: Keys and values, as wide as the prompts; entries past a prompt's beginning are meaningless.
      length: int32, number of tokens of the shortest beginning; smaller than the length of every prompt.
    """

    prefix: Prefix
    length: Array


class DecodeOutput(NamedTuple):
    """Result of `decode`: one token of every slot, or T tokens, with a dimension T after B.

    Attributes:
      hidden_BD: Hidden state after the final norm, which predicts the next token.
      cache: Cache with the keys and values of the tokens added.
      choice_BLk: int16, ids of the experts chosen for the token; None for a dense model.
    """

    hidden_BD: Array
    cache: Cache
    choice_BLk: Array | None = None


@causal_lm_method
def hidden_states(
    params: Params,
    config: ModelConfig,
    token_RW: Int[Array, "R W"],
    position_RW: Int[Array, "R W"],
    segment_RW: Int[Array, "R W"],
    *,
    layers: list[Params] | None = None,
    shared_prefix: AttentionMask | None = None,
    images: ImageRows | None = None,
    router: RouterInputs = NO_ROUTER_INPUTS,
    execution: Execution = ONE_DEVICE,
) -> HiddenStates:
    """Run the decoder over packed rows.

    Args:
      position_RW, segment_RW: Index of each token in its own sequence, and number of this sequence in its row, from 1;
        0 is padding.
      layers: Result of `unstack_layers`; replaces the layers of `params`, which may be absent.
      shared_prefix: Mask of sequences that share prompts (`SharedPrefix` or `SharedTokens`), in place of the segments.
      images: Images of the rows; their features replace the embeddings of image tokens. None is text only.
      router: Tokens that count for the load balance of experts, and expert choices to replay.
      execution: Result of `choose_execution` for the mesh of the rows.
    """
    sight = run_tower(params, config.vision, images, execution)
    turn = rotations(config, execution.slices(position_RW), mrope_position_RW3=sight and sight.mrope_position_RW3)
    embed_RWD = _embed(params, config, execution.slices(token_RW), execution, sight)
    inputs = _inputs(params, config, execution.slices(token_RW), embed_RWD)
    hidden_RWD = execution.split_rows(make_streams(params, config, embed_RWD))

    def stack(layers, hidden_RWD, rows):
        turn, mask, router, sight = rows
        replay = {}
        if router.replayed is not None:
            replay = split_by_stack(jnp.moveaxis(execution.slices(router.replayed), 2, 0), config, skip=(DENSE_LAYERS,))

        def step(name, flow, each):
            layer, (replayed_RWk, input_RWP) = each
            asked = router._replace(replayed=replayed_RWk)
            borrowed, how = flow.lent.get(LENDERS.get(name)), config.of_stack(name)
            hidden_RWD, kept, routed = layer_rows(
                layer, how, flow.hidden, turn, mask, execution, asked, borrowed=borrowed, input_RWP=input_RWP
            )
            return flow.passed(name, _deeper(sight, hidden_RWD, layer), kept), {"router": routed}

        extras = {name: (replay.get(name), inputs.get(name)) for name in STACKS}
        flow = Flow(hidden_RWD, nothing_lent(config, hidden_RWD, execution))
        flow, outputs = run_layers(config, rematerialised(step, execution), flow, layers, extras)
        return flow.hidden, outputs

    image_RW = sight and sight.block_RW
    if shared_prefix is not None and image_RW is not None:
        raise ValueError("shared_prefix requires causal attention in images; pass whole sequences")
    rows = turn, Segments(segment_RW, image_RW) if shared_prefix is None else shared_prefix, router, sight
    all_layers = stacks(params, config, execution.pipeline) if layers is None else layers
    hidden_RWD, outputs = pipeline_forward(execution.pipeline, stack, all_layers, hidden_RWD, rows)
    hidden_RWD = norm(config, merge_streams(params, config, hidden_RWD), params["final_norm"])
    return HiddenStates(execution.joined(hidden_RWD), outputs.get("router"))


@causal_lm_method
def prefill(
    params: Params,
    config: ModelConfig,
    token_PS: Int[Array, "P S"],
    length_P: Int[Array, "P"],
    *,
    layers: list[Params] | None = None,
    chunk_tokens: int | None = None,
    past: Past | None = None,
    images: ImageRows | None = None,
    execution: Execution = ONE_DEVICE,
) -> PrefillOutput:
    """Run left-aligned prompts through the decoder.

    Args:
      length_P: Number of tokens of each prompt, at least 1; the rest of its row is padding.
      layers: Result of `unstack_layers`; replaces the layers of `params`, which may be absent. Larger to compile.
      chunk_tokens: Number of tokens of each prompt that run at a time. Activation memory is that of one chunk, and
        chunks past the longest prompt's end are skipped. None runs prompts whole.
      past: Beginnings to continue, chunk by chunk; expert choices before `past.length` are reported as 0.
      images: Images of the prompts; their features replace the embeddings of image tokens. None is text only.

    Raises:
      ValueError: `chunk_tokens` is below 1, or a chunk might split an image whose tokens see each other.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}; expected 1 or more, or None to prefill whole prompts")
    all_layers = stacks(params, config, execution.pipeline) if layers is None else layers
    sight = run_tower(params, config.vision, images, execution)
    prompts = params, config, all_layers, token_PS, length_P, sight, execution
    width = token_PS.shape[1]
    if past is None and (chunk_tokens is None or chunk_tokens >= width):
        found = _prefill_whole(*prompts)
    elif sight is not None and sight.block_RW is not None:
        raise ValueError("bidirectional attention in images requires whole prompts; set chunk_tokens=None, past=None")
    else:
        found = _prefill_chunks(*prompts, min(chunk_tokens or width, width), past)
    return found._replace(hidden_PD=norm(config, merge_streams(params, config, found.hidden_PD), params["final_norm"]))


def _prefill_whole(
    params: Params,
    config: ModelConfig,
    layers: Layers,
    token_PS: Array,
    length_P: Array,
    sight: ImageFeatures | None,
    execution: Execution,
) -> PrefillOutput:
    position_PS = jnp.broadcast_to(jnp.arange(token_PS.shape[1]), token_PS.shape)
    segment_PS = (position_PS < length_P[:, None]).astype(jnp.int32)
    turn = rotations(config, position_PS, mrope_position_RW3=sight and sight.mrope_position_RW3)
    embed_PSD = _embed(params, config, token_PS, execution, sight)
    inputs, hidden_PSD = _inputs(params, config, token_PS, embed_PSD), make_streams(params, config, embed_PSD)

    def stack(layers, hidden_PSD, rows):
        turn, segment_PS, sight = rows

        def step(name, flow, each):
            layer, input_PSP = each
            mask = Segments(segment_PS, sight and sight.block_RW)
            borrowed, how = flow.lent.get(LENDERS.get(name)), config.of_stack(name)
            hidden_PSD, kept, routed = layer_rows(
                layer, how, flow.hidden, turn, mask, execution, borrowed=borrowed, input_RWP=input_PSP
            )
            return flow.passed(name, _deeper(sight, hidden_PSD, layer), kept), _kept(name, kept, routed)

        flow = Flow(hidden_PSD, nothing_lent(config, hidden_PSD, execution))
        flow, outputs = run_layers(config, step, flow, layers, inputs)
        return flow.hidden, outputs

    rows = turn, segment_PS, sight
    hidden_PSD, outputs = pipeline_forward(execution.pipeline, stack, layers, hidden_PSD, rows)
    further = hidden_PSD, next_of_prompts(token_PS, length_P), turn, Segments(segment_PS), execution
    outputs["keys"] = with_mtp(outputs["keys"], params, config, *further)
    prefix, choice_LPSk = _prefix_of(outputs).interleave(execution.cache_ways), outputs.get("choice")
    hidden_PD = jnp.take_along_axis(hidden_PSD, (length_P - 1)[:, None, None], axis=1)[:, 0]
    choice_PSLk = None if choice_LPSk is None else jnp.moveaxis(choice_LPSk, 0, 2).astype(jnp.int16)
    return PrefillOutput(hidden_PD, prefix, choice_PSLk)


def _prefill_chunks(
    params: Params,
    config: ModelConfig,
    layers: Layers,
    token_PS: Array,
    length_P: Array,
    sight: ImageFeatures | None,
    execution: Execution,
    chunk_tokens: int,
    past: Past | None,
) -> PrefillOutput:
    """Run one chunk after another, each through all pipeline stages. The last chunk may overlap the chunk before it."""
    prompts, given_width = token_PS.shape
    if config.linear is not None:  # a state must not read a token twice: pad, so that chunks do not overlap
        token_PS = jnp.pad(token_PS, ((0, 0), (0, -given_width % chunk_tokens)))
        sight = None if sight is None else sight.padded(token_PS.shape[1])
    width, next_PS = token_PS.shape[1], next_of_prompts(token_PS, length_P)

    def stack(layers, kept, hidden_PCD, place, working=True):
        (turn, start, length_P, next_PC, sight, inputs), (prefix, choice_PSLk) = place, kept

        def step(name, flow, each):
            layer, (index, input_PCP) = each
            chunk = Chunk(prefix.of_stack(name), index, start, length_P)
            borrowed, how = flow.lent.get(LENDERS.get(name)), config.of_stack(name)
            hidden_PCD, kept, routed = layer_rows(
                layer, how, flow.hidden, turn, chunk, execution, borrowed=borrowed, input_RWP=input_PCP
            )
            return flow.passed(name, _deeper(sight, hidden_PCD, layer), kept), _kept(name, kept, routed)

        extras = {name: (at, inputs.get(name)) for name, at in cache_places(config, execution.stages).items()}
        flow = Flow(hidden_PCD, nothing_lent(config, hidden_PCD, execution))
        (hidden_PCD, _), outputs = run_layers(config, step, flow, layers, extras)
        chunk = Chunk(prefix, jnp.int32(config.attention_layers), start)
        outputs["keys"] = with_mtp(outputs["keys"], params, config, hidden_PCD, next_PC, turn, chunk, execution)
        prefix = write_chunk(prefix, _prefix_of(outputs), start, working=working, execution=execution)
        if "choice" in outputs:
            choice_PCLk = jnp.moveaxis(outputs["choice"], 0, 2).astype(jnp.int16)
            choice_PSLk = jax.lax.dynamic_update_slice_in_dim(choice_PSLk, choice_PCLk, start, axis=1)
        return hidden_PCD, (prefix, choice_PSLk)

    def body(count, carry):
        last_PD, kept = carry
        start = jnp.minimum(prefilled + count * chunk_tokens, width - chunk_tokens)
        cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=chunk_tokens, axis=1)
        token_PC, next_PC = cut(token_PS), cut(next_PS)
        part = None if sight is None else sight.part(start, chunk_tokens)
        position_PC = jnp.broadcast_to(start + jnp.arange(chunk_tokens), token_PC.shape)
        turn = rotations(config, position_PC, mrope_position_RW3=part and part.mrope_position_RW3)
        embed_PCD = _embed(params, config, token_PC, execution, part)
        place = turn, start, length_P, next_PC, part, _inputs(params, config, token_PC, embed_PCD)
        hidden_PCD = make_streams(params, config, embed_PCD)
        if execution.pipeline is None:
            hidden_PCD, kept = stack(layers, kept, hidden_PCD, place)
        else:
            hidden_PCD, kept = pipeline_decode(execution.pipeline, stack, layers, kept, hidden_PCD, place)
        # If a prompt continues after this chunk, the next chunk replaces this hidden state.
        last_P = length_P - 1 - start
        here_P1D = jnp.take_along_axis(hidden_PCD, jnp.clip(last_P, 0, chunk_tokens - 1)[:, None, None], axis=1)
        return jnp.where((last_P >= 0)[:, None], here_P1D[:, 0], last_PD), kept

    choice_PSLk = None
    if config.experts is not None:
        choice_PSLk = jnp.zeros((prompts, width, *config.routed_choices), jnp.int16)
    prefix, prefilled = past or (empty_prefix(config, prompts=prompts, width=width, execution=execution), jnp.int32(0))
    start_state = jnp.zeros((prompts, config.stream_width), execution.dtype), (prefix, choice_PSLk)
    chunks = -(-(length_P.max() - prefilled) // chunk_tokens)
    last_PD, (prefix, choice_PSLk) = jax.lax.fori_loop(0, chunks, body, start_state)
    if width != given_width:  # only in models with linear attention
        keys, values = (resized(leaf, given_width, execution.cache_ways, axis=2) for leaf in prefix[:2])
        prefix = prefix._replace(key_LPSKH=keys, value_LPSKH=values)
        choice_PSLk = None if choice_PSLk is None else choice_PSLk[:, :given_width]
    return PrefillOutput(last_PD, prefix, choice_PSLk)


def _kept(stack: str, kept: Prefix | LayerState | None, routed: RouterOutputs | None) -> dict[str, Any]:
    """Return the outputs of one layer in prefill by name."""
    name = "state" if isinstance(kept, LayerState) else "sliding" if stack == SLIDING_LAYERS else "keys"
    return {name: kept} if routed is None else {name: kept, "choice": routed.choice_RWk}


def _prefix_of(outputs: dict[str, Any]) -> Prefix:
    """Build the `Prefix` of all layers from the outputs of `run_layers`."""
    return outputs["keys"]._replace(state=outputs.get("state"), sliding=outputs.get("sliding"))


def _inputs(params: Params, config: ModelConfig, token_RW: Array, embed_RWD: Array) -> dict[str, Array]:
    """Return the layers' own inputs by stack; empty if layers have none."""
    input_LRWP = layer_inputs(params, config, token_RW, embed_RWD)
    return {} if input_LRWP is None else split_by_stack(input_LRWP, config)


@causal_lm_method
def decode(
    layers: list[Params],
    params: Params,
    config: ModelConfig,
    token_B: Int[Array, "B *T"],
    position_B: Int[Array, "B"],
    cache: Cache,
    *,
    offset_B: Int[Array, "B"] | None = None,
    execution: Execution = ONE_DEVICE,
) -> DecodeOutput:
    """Run few tokens of every slot: write keys and values at each token's position, and attend up to this position.

    Args:
      layers: Result of `unstack_layers`, prepared once before the decode loop.
      params: Parameter tree that `layers` came from; its stacked layers are not read and may be absent.
      token_B: Newest token of each slot, or T consecutive tokens, `[B, T]`, which leave states of linear attention
        `Unsettled` and do not pass pipeline stages with such states.
      position_B: Index of the slot's first token in its sequence, below the cache's capacity.
      offset_B: Rotary position minus `position_B`, for tokens after images; None is no difference.
    """
    token_BT, first_B = token_B.reshape(len(token_B), -1), position_B if offset_B is None else position_B + offset_B
    turned_BT, chosen = first_B[:, None] + jnp.arange(token_BT.shape[1])[None], []
    turn = rotations(config, turned_BT, longest=capacity_of(cache))
    embed_BTD = _embed(params, config, token_BT, execution, None)
    input_LBTP = layer_inputs(params, config, token_BT, embed_BTD)

    def stack(layers, cache, hidden_BTD, slots, working=True):
        turn, position_B = slots
        caches: Any = iter(cache)
        entry_B = position_B if working is True else jnp.where(working, position_B, NOWHERE)
        working_B = jnp.broadcast_to(jnp.asarray(working), position_B.shape)
        shared, written = dict[str, Any](), []
        for index, (layer, name) in enumerate(zip(layers, config.pattern.stack_of(), strict=False)):
            stored = shared[LENDERS[name]] if name in LENDERS else next(caches)
            input_BTP = None if input_LBTP is None else input_LBTP[index]
            hidden_BTD, shared[name], routed = layer_slots(
                *(layer, config.of_stack(name), hidden_BTD, turn, position_B, entry_B, stored, execution, working_B),
                input_BTP=input_BTP,
            )
            if name not in LENDERS:
                written.append(shared[name])
            if routed is not None:  # models with experts have no stages, so this list is not inside a shard_map
                chosen.append(routed.choice_RWk.astype(jnp.int16))
        return hidden_BTD, written

    run = stack if execution.pipeline is None else partial(pipeline_decode, execution.pipeline, stack)
    hidden_BTD, written = run(layers, cache, make_streams(params, config, embed_BTD), (turn, position_B))
    choice_BLk = jnp.stack(chosen, axis=2).reshape(*token_B.shape, len(chosen), -1) if chosen else None
    hidden_BTD = norm(config, merge_streams(params, config, hidden_BTD), params["final_norm"])
    return DecodeOutput(hidden_BTD.reshape(*token_B.shape, -1), written, choice_BLk)


def _embed(
    params: Params, config: ModelConfig, token_RW: Array, execution: Execution, sight: ImageFeatures | None
) -> Array:
    """Look up the embeddings of tokens, and put image features in the places of image tokens."""
    embed_RWD = embedded(params, config, token_RW, execution)
    return embed_RWD if sight is None else sight.merged(embed_RWD)


def _deeper(sight: ImageFeatures | None, hidden_RWD: Array, layer: Params) -> Array:
    """Add the vision tower's features for this layer (deepstack) to the hidden states after the layer."""
    return hidden_RWD if sight is None or "depth" not in layer else sight.deeper(hidden_RWD, layer["depth"][0])
