"""Tokenizer of a GGUF file: made by transformers, with the ids, special tokens and rules that the file states."""

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.models.huggingface.gguf_header import Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_BYTES, _SENTENCEPIECE = "gpt2", "llama"
"""Kinds of vocabularies, as GGUF files name them."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Types of tokens; control and user-defined tokens are matched in a text before all others."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Special tokens of transformers, and their names in a GGUF file."""

_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Pre-tokenizer rules under which a word that is a token is not merged from parts. Texts begin with BOS unless the file
says no.

Source: ggml-org/llama.cpp, src/llama-vocab.cpp, also of the sets below.
"""
_SMOLLM = "smollm"
_GPT2 = {"gpt-2", "phi-2", "mellum", "exaone4"}
"""Pre-tokenizer rules equal to GPT-2's, which transformers falls back on."""
_NFC = {"qwen2", "deepseek-r1-qwen"}
"""Pre-tokenizer rules of models whose own tokenizers normalize texts to NFC."""


def read_tokenizer(header: Header) -> "PreTrainedTokenizerBase":
    """Make the tokenizer of a GGUF file, with the file's chat template if it has one.

    Raises:
      Refusal: The file has no tokenizer, or a tokenizer that transformers cannot make.
    """
    given = {key.removeprefix("tokenizer."): value for key, value in header.values.items()}
    given |= {f"ggml.{name}": listed for name, listed in header.tokens.items()}
    tokens, rules = header.tokens.get("tokens", []), given.get("ggml.pre")
    ids = {name: given.get(f"ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

        names = GGUF_TOKENIZER_MAPPING["tokenizer"]
        renamed = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
        backend, _ = convert_gguf_tokenizer(header.architecture, renamed)
        repaired = _repaired(backend, header, given)
        special = {name: tokens[number] for name, number in ids.items() if number is not None}
    except ImportError as error:
        raise Refusal(f"{header.file} requires a newer transformers: pip install 'jaxrlhf[gguf]'") from error
    except Exception as error:  # transformers and tokenizers raise no specific class for such files
        raise Refusal(
            f"transformers cannot convert the tokenizer of {header.file} ({reason_of(error)}); use the directory "
            "with the model's safetensors and tokenizer.json"
        ) from error
    return PreTrainedTokenizerFast(
        tokenizer_object=repaired,
        chat_template=given.get("chat_template"),
        add_bos_token=given.get("ggml.add_bos_token", given.get("ggml.model") == _SENTENCEPIECE or rules in _LLAMA3),
        add_eos_token=given.get("ggml.add_eos_token", False),
        clean_up_tokenization_spaces=False,
        **special,
    )


def doubt_of(header: Header) -> str | None:
    """Return a warning if a file does not name its pre-tokenizer rules, or names unknown rules; else None."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    rules = header.values.get("tokenizer.ggml.pre")
    known = {_SMOLLM, *_GPT2, *gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS}
    if header.values.get("tokenizer.ggml.model") != _BYTES or rules in known:
        return None
    said = "does not name its pre-tokenizer" if rules is None else f"has the unknown pre-tokenizer {rules!r}"
    return f"{header.file} {said}, so GPT-2's is used; if tokens differ, set another tokenizer with --tokenizer"


def _repaired(backend: "Tokenizer", header: Header, given: dict[str, Any]) -> "Tokenizer":
    """Return the tokenizer with exactly the file's tokens, under their ids.

    The classes of transformers add special tokens after the file's tokens, and spell control tokens in bytes.
    """
    from tokenizers import AddedToken, Tokenizer

    made = json.loads(backend.to_str())
    tokens, rules = header.tokens["tokens"], given.get("ggml.pre")
    made["added_tokens"], made["post_processor"] = [], None
    if given["ggml.model"] == _BYTES:
        made["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
        made["model"]["ignore_merges"] = rules in _LLAMA3
        if rules in _NFC:
            made["normalizer"] = {"type": "NFC"}
        if rules == _SMOLLM:  # split digits before GPT-2's rules; otherwise line breaks before a digit would be split
            digits = {"type": "Digits", "individual_digits": True}
            made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, made["pre_tokenizer"]]}
    elif given.get("ggml.add_space_prefix") is False and made["pre_tokenizer"]["type"] == "Metaspace":
        made["pre_tokenizer"]["prepend_scheme"] = "never"
        made["decoder"]["decoders"] = [part for part in made["decoder"]["decoders"] if part["type"] != "Strip"]
    repaired = Tokenizer.from_str(json.dumps(made))
    kinds, vocabulary = list(header.tokens.get("token_type", [])), repaired.get_vocab()
    for number, kind in enumerate(kinds):  # some files mark the token that opens a turn as normal
        if kind == _NORMAL and tokens[number] in _named(given.get("chat_template") or ""):
            kinds[number] = _CONTROL
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, its in zip(tokens, kinds, strict=False) if its == kind and token in vocabulary]
        add = repaired.add_special_tokens if special else repaired.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in found])
    if repaired.get_vocab_size() != len(set(tokens)):
        raise ValueError(f"the tokenizer has {repaired.get_vocab_size()} tokens, but the file has {len(set(tokens))}")
    return repaired


@cache
def _named(template: str) -> frozenset[str]:
    """Return the texts in angle brackets that a chat template contains."""
    return frozenset(re.findall(r"<[^<>\s]+>", template))
