"""Header of a GGUF file: its metadata as the fields of a config.json."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.models.config import Llama3Rope
from jaxrlhf.models.rope import frequencies

_MAGIC = b"GGUF"
_LLAMA3: dict[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Numbers that all published Llama 3 models share; a GGUF file has only the factors computed from these numbers."""
_TOLERANCE = 1e-4
_OF_OTHERS = ("attention.scale", "logit_scale", "embedding_scale", "residual_scale", "attention.clamp_kqv")
"""Keys of factors that the decoders of the supported architectures do not have."""
_OF_SCALING = ("type", "factor", "original_context_length", "finetuned")
"""Keys of rotary scaling that are read, or that do not affect the forward pass."""
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<EOT>")
"""Tokens that end a turn in some vocabulary, even if the file does not say so."""
_TOKEN_LISTS = ("tokens", "token_type", "merges", "scores")


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file.

    Attributes:
      values: Metadata by key, without the lists in `tokens`.
      tokens: Lists with an entry for each token or merge, by the last part of their keys.
      tensors: Tensors by name, as the package `gguf` maps them.
    """

    file: Path
    values: Mapping[str, Any]
    tokens: Mapping[str, list[Any]]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """Name of the model's architecture, one of `ARCHITECTURES`."""
        return str(self.values["general.architecture"])

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture, such as `block_count`."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            raise Refusal(
                f"{self.file} has {self.architecture}.{key} as a list, so its layers differ, which is not supported "
                "for GGUF; use the model's safetensors"
            )
        return value

    def need(self, key: str) -> Any:
        """Return the value of a required key of the architecture."""
        if (value := self.take(key)) is None:
            raise Refusal(f"{self.file} has no {self.architecture}.{key}; convert the model to GGUF again")
        return value


def read_header(file: Path) -> Header:
    """Read the header of a GGUF file; it is cached until the file changes.

    Raises:
      Refusal: The file is no GGUF file, is damaged or truncated, or has a type of weights that cannot be dequantized.
    """
    status = file.stat()
    return _read(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _read(file: Path, size: int, written_ns: int) -> Header:
    with file.open("rb") as opened:
        start = opened.read(len(_MAGIC))
    if start != _MAGIC:
        raise Refusal(f"{file} is not a GGUF file: it starts with {start!r}, not {_MAGIC!r}; download it again")
    try:
        import gguf
    except ImportError as error:
        raise Refusal(f"{file} requires the package gguf: pip install 'jaxrlhf[gguf]'") from error

    class Reader(gguf.GGUFReader):
        """Reader that stops at the end of the file; the package's reader reads nothing there, perhaps forever."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, *order: Any, **named: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"the file has {len(self.data)} bytes, but its header refers to byte {end}")
            return super()._get(offset, dtype, count, *order, **named)

    try:
        reader = Reader(file)
        if reader.byte_order != "I":
            raise ValueError("the file is in the other byte order, which is not supported")
        values = {name: field.contents() for name, field in reader.fields.items()}
        tokens = {name: values.pop(key) for name in _TOKEN_LISTS if (key := f"tokenizer.ggml.{name}") in values}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError, OSError, RecursionError) as error:
        raise Refusal(f"{file} is damaged or truncated ({reason_of(error)}); download it again") from error
    header = Header(file, values, tokens, tensors)
    with _senseless(header):
        _check(header, gguf)
    return header


@contextmanager
def _senseless(header: Header) -> Iterator[None]:
    """Raise `Refusal` in place of Python's errors for values that no model can have."""
    try:
        yield
    except (TypeError, ArithmeticError, LookupError) as error:  # a text in place of a number, no heads, one dimension
        raise Refusal(
            f"{header.file} has invalid values in its header ({reason_of(error)}); download it again"
        ) from error


def _check(header: Header, gguf: Any) -> None:
    """Refuse other architectures, parts of split files, and weights that cannot be dequantized."""
    named = header.values.get("general.architecture")
    if not isinstance(named, str) or named not in ARCHITECTURES:
        raise Refusal(
            f"{header.file} has architecture {named!r}, but GGUF files are supported for {', '.join(ARCHITECTURES)}; "
            "use the directory with the model's safetensors"
        )
    if (parts := header.values.get("split.count", 1)) > 1:
        raise Refusal(
            f"{header.file} is one of {parts} parts; join them with `llama-gguf-split --merge`, and use the result"
        )
    for key in _OF_OTHERS:
        if header.take(key) not in (None, 0, 0.0, 1, 1.0):
            raise Refusal(
                f"{header.file} has {named}.{key}={header.take(key)}, which is not supported for GGUF; use the "
                "model's safetensors"
            )
    if header.take("expert_count", 0):
        raise Refusal(f"{header.file} has experts, which are not supported for GGUF; use the model's safetensors")
    for tensor in {tensor.tensor_type: tensor for tensor in header.tensors.values()}.values():
        try:
            gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise Refusal(
                f"{header.file} has {tensor.name} as {tensor.tensor_type.name}, which the package gguf cannot "
                "dequantize; use a file with another quantization, such as Q8_0"
            ) from error


def config_fields(header: Header) -> dict[str, Any]:
    """Return the fields of a config.json for the model in a GGUF file.

    Raises:
      Refusal: A value is missing or impossible, or the model has something that its architecture's decoder does not
        compute.
    """
    with _senseless(header):
        return _shared_fields(header) | ARCHITECTURES[header.architecture](header)


def _shared_fields(header: Header) -> dict[str, Any]:
    """Return the fields of config.json that all architectures have."""
    heads, width = header.need("attention.head_count"), header.need("embedding_length")
    head_dim = header.take("attention.key_length", width // heads)
    rotated = header.take("rope.dimension_count", head_dim)
    values = header.take("attention.value_length", head_dim)
    if not head_dim == rotated == values:
        raise Refusal(
            f"{header.file} has heads of {head_dim} for keys and {values} for values, {rotated} of them rotated, "
            "which is not supported for GGUF; use the model's safetensors"
        )
    if "token_embd.weight" not in header.tensors:
        raise Refusal(f"{header.file} has no token_embd.weight, so the model is incomplete; use another file")
    return {
        "vocab_size": int(header.tensors["token_embd.weight"].shape[1]),
        "hidden_size": width,
        "intermediate_size": header.need("feed_forward_length"),
        "num_hidden_layers": header.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.take("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.need("context_length"),
        "rms_norm_eps": _shortest(header.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(header) or None,
        "pad_token_id": header.values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _ends(header: Header) -> list[int]:
    """Return the ids of the tokens that end a text or a turn."""
    said = [header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = {token: number for number, token in enumerate(header.tokens.get("tokens", []))}
    found = [*said, *header.values.get("tokenizer.ggml.eos_token_ids", []), *map(known.get, _TURN_ENDS)]
    return list(dict.fromkeys(int(end) for end in found if end is not None))


def _shortest(value: float) -> float:
    """Return the shortest number with the same float32 value, such as 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _one_rope(header: Header) -> dict[str, Any]:
    """Return the rotary positions of a model whose layers are alike."""
    return {"rope_parameters": {"rope_theta": _shortest(header.take("rope.freq_base", 10_000.0)), **_scaling(header)}}


def _scaling(header: Header) -> dict[str, Any]:
    """Return the scaling of rotary frequencies, in the names of `rope_parameters`."""
    prefix = f"{header.architecture}.rope.scaling."
    keys = {key.removeprefix(prefix) for key in header.values if key.startswith(prefix)}
    if unread := sorted(keys - {*_OF_SCALING}):
        raise Refusal(
            f"{header.file} has {prefix}{unread[0]}, which is not supported for GGUF; use the model's safetensors"
        )
    kind = header.take("rope.scaling.type", "linear")
    factor = header.take("rope.scaling.factor", header.take("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header)
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind == "yarn":
        original = header.need("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": _shortest(factor), "original_max_position_embeddings": original}
    raise Refusal(
        f"{header.file} has {header.architecture}.rope.scaling.type={kind!r}, but GGUF files are supported with "
        "none, linear and yarn; use the model's safetensors"
    )


def _llama3_scaling(header: Header) -> dict[str, Any]:
    """Recover Llama 3's rotary scaling from the divisors of the frequencies.

    Raises:
      Refusal: The divisors are not the divisors of a published Llama 3.
    """
    divisors = np.asarray(header.tensors["rope_freqs.weight"].data, np.float32)
    theta, factor = header.take("rope.freq_base", 10_000.0), float(divisors.max())
    plain, scaled = (
        frequencies(2 * len(divisors), theta, scaling)[0] for scaling in (None, Llama3Rope(factor, **_LLAMA3))
    )
    if not np.allclose(divisors, plain / scaled, rtol=_TOLERANCE):
        raise Refusal(
            f"{header.file} scales rotary frequencies (rope_freqs.weight) differently from Llama 3, which is not "
            "supported for GGUF; use the model's safetensors"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _fields(header: Header, *, architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of an architecture whose layers are alike."""
    return {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, **fields, **_one_rope(header)}


def _gemma(header: Header, largest: int) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 share.

    Args:
      largest: Number of layers of the version's largest model, which scales queries by hidden size / number of heads.
    """
    heads, width = header.need("attention.head_count"), header.need("embedding_length")
    even = header.need("block_count") == largest
    return {
        "query_pre_attn_scalar": width // heads if even else header.take("attention.key_length", 256),
        "sliding_window": header.need("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(header: Header) -> dict[str, Any]:
    return _fields(
        header,
        architecture="Gemma2",
        model_type="gemma2",
        **_gemma(header, largest=46),
        attn_logit_softcapping=header.take("attn_logit_softcapping", 50.0),
        final_logit_softcapping=header.take("final_logit_softcapping", 30.0),
    )


def _gemma3(header: Header) -> dict[str, Any]:
    full = {"rope_theta": _shortest(header.take("rope.freq_base", 1_000_000.0)), **_scaling(header)}
    near = {"rope_theta": _shortest(header.take("rope.freq_base_swa", 10_000.0)), "rope_type": "default"}
    return {
        **_gemma(header, largest=62),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "final_logit_softcapping": header.take("final_logit_softcapping"),
        "sliding_window_pattern": header.take("attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
    }


ARCHITECTURES: dict[str, Callable[[Header], dict[str, Any]]] = {
    "llama": partial(_fields, architecture="Llama", model_type="llama"),
    "qwen2": partial(_fields, architecture="Qwen2", model_type="qwen2"),
    "qwen3": partial(_fields, architecture="Qwen3", model_type="qwen3"),
    "gemma": partial(_fields, architecture="Gemma", model_type="gemma", hidden_activation="gelu_pytorch_tanh"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""Supported architectures, each with a function that returns the architecture's own fields of config.json."""
