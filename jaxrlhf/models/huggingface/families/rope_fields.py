"""Fields of rotary positions in config.json: in `rope_parameters` since transformers 5, at the top level before."""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from jaxrlhf.models.config import (
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    ProportionalRope,
    RopeScaling,
    YarnRope,
)
from jaxrlhf.models.huggingface.families.fields import Fields

_KINDS: dict[str, type[RopeScaling] | None] = {
    "default": None,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "proportional": ProportionalRope,
}
_OTHER_NAMES = {"su": "longrope"}
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Fields that make no difference to text, because a text token has equal positions in all three parts."""


def read_rope(given: Fields, *, unread: Collection[str] = ()) -> dict[str, Any]:
    """Read the base, scaling, rotated part and longest sequence of a model whose layers are alike.

    Args:
      unread: Fields of the dictionary to ignore, because they make no difference.

    Raises:
      Refusal: The dictionaries of newer and of older versions are both there, and differ.
    """
    outer = {name: given.take(name) for name in ("rope_theta", "partial_rotary_factor")}
    both = [given.take(name) or {} for name in ("rope_parameters", "rope_scaling")]
    kept = [{name: value for name, value in rope.items() if name not in unread} for rope in both if rope]
    found = [parse_rope(outer | rope, given) for rope in kept or [{}]]
    if found[0] != found[-1]:
        raise given.error(
            f"rope_parameters={both[0]!r} and rope_scaling={both[1]!r}, so readers disagree",
            "set both to the same values, or remove one",
        )
    return found[0]


def parse_rope(rope: Mapping[str, Any], given: Fields) -> dict[str, Any]:
    """Read the base, scaling, rotated part and longest sequence of one kind of layers, from its dictionary.

    Raises:
      Refusal: The kind of scaling is not supported, or has other fields than it should.
    """
    # All numbers except context lengths are floats, even if the file writes them without a decimal point.
    rope = {
        name: float(value) if type(value) is int and "max" not in name else value
        for name, value in rope.items()
        if value is not None
    }
    named = {str(rope.pop(name)) for name in ("rope_type", "type") if name in rope} or {"default"}
    kinds = {_OTHER_NAMES.get(name, name) for name in named}
    if len(kinds) > 1 or not kinds <= set(_KINDS):
        raise given.error(f"rope type {sorted(named)}", f"supported are {sorted(_KINDS)}")
    kind = kinds.pop()
    theta = float(rope.pop("rope_theta", 10_000.0))
    rotated = 1.0 if kind == "proportional" else float(rope.pop("partial_rotary_factor", 1.0))
    longest = int(given.need("max_position_embeddings"))
    original = given.take("original_max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):
        # A length next to the dictionary overrides a length inside.
        rope["original_max_position_embeddings"] = original or rope.get("original_max_position_embeddings") or longest
    if kind == "longrope":
        longest = _complete_longrope(rope, longest)
    scaling = _KINDS[kind]
    known = {} if scaling is None else {each.name: each.default is MISSING for each in fields(scaling)}
    if not {name for name, needed in known.items() if needed} <= rope.keys() <= known.keys():
        raise given.error(f"rope type {kind!r} with the fields {sorted(rope)}", f"expected {sorted(known)}")
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else scaling(**rope),
        "partial_rotary_factor": rotated,
        "max_positions": longest,
    }


def _complete_longrope(rope: dict[str, Any], longest: int) -> int:
    """Convert lists to tuples, fill in the attention factor, and return the longest supported sequence."""
    original = rope["original_max_position_embeddings"]
    factor = rope.pop("factor", longest / original)
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    rope.setdefault("attention_factor", stretched)
    rope |= {name: tuple(map(float, rope[name])) for name in ("short_factor", "long_factor") if name in rope}
    return min(longest, original)


def read_two_ropes(given: Fields, *, full_theta: float, sliding_theta: float) -> dict[str, Any]:
    """Read the rotary positions of layers without and with a window; in `rope_parameters` since transformers 5.

    Args:
      full_theta: Default base of layers without a window.
      sliding_theta: Default base of layers with a window.

    Raises:
      Refusal: Rotary positions of layers with a window are scaled, there are layers of another kind, or
        `rope_parameters` and `rope_scaling` differ.
    """
    given.take("rope_theta")
    ropes, scaling = given.take("rope_parameters") or {}, given.take("rope_scaling") or {}
    own = ropes.get("full_attention") or {}
    if any(scaling.get(name, value) != value for name, value in own.items()):
        raise given.error(f"rope_scaling={scaling!r} and rope_parameters of full_attention={own!r}", "remove one")
    full = {"rope_theta": full_theta, **scaling, **own}
    sliding = {"rope_theta": sliding_theta}
    sliding |= ropes.get("sliding_attention") or {}
    if unread := ropes.keys() - {"full_attention", "sliding_attention"}:
        raise given.error(f"rope_parameters of {sorted(unread)}", "supported are full_attention and sliding_attention")
    near = parse_rope(sliding, given)
    if near["rope_scaling"] is not None:
        raise given.error("scaled rope_parameters of sliding_attention", "scaling is supported only for full_attention")
    return parse_rope(full, given) | {"sliding_rope_theta": near["rope_theta"]}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_rope` reads, as transformers 5 writes them and as older versions read them."""
    scaling = config.rope_scaling
    kind = next(name for name, known in _KINDS.items() if known is (None if scaling is None else type(scaling)))
    given = {} if scaling is None else {name: value for name, value in asdict(scaling).items() if value is not None}
    scaled = {"rope_type": kind, **given}
    part = {} if config.partial_rotary_factor == 1.0 else {"partial_rotary_factor": config.partial_rotary_factor}
    return {
        "rope_parameters": scaled | {"rope_theta": config.rope_theta} | part,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else scaled,
        **part,
    }
