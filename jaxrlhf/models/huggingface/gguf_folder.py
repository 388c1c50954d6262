"""A GGUF file seen as a checkpoint directory: config.json, tokenizer, and a link to the file in place of weights."""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.models.huggingface.gguf_header import Header, config_fields, read_header
from jaxrlhf.runtime.cache_folder import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LINK = "model.gguf"
"""Link in the directory to the file itself."""
SUFFIX = ".gguf"
_NOTICE = "notice.txt"
"""File of a warning that is given whenever the directory is used."""
_VERSION = 1
"""Number that changes with what is written into a directory."""
_SMOLLM = "smollm"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Special tokens of transformers by their names in a GGUF file."""
_PRE_TOKENIZERS = {
    *("default", "gpt-2", _SMOLLM, "llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx", "tekken"),
    *("qwen2", "deepseek-r1-qwen", "megrez"),
}
"""Rules of cutting text before byte-pair encoding that transformers reads from a file, and SmolLM's."""


def as_directory(file: Path) -> Path:
    """Directory that describes a GGUF file, kept in the cache folder until the file is written anew.

    Raises:
      Refusal: The file is no GGUF file, is damaged or cut, or holds a model that is not read.
    """
    file, status = file.absolute(), file.stat()
    facts = f"{file} {status.st_size} {status.st_mtime_ns} {_VERSION}"
    folder = _place() / f"{file.stem}-{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}"
    if not (folder / "config.json").is_file():
        _describe(file, folder)
    if (folder / _NOTICE).is_file():
        warnings.warn((folder / _NOTICE).read_text(), RuntimeWarning, stacklevel=2)
    return folder


def _describe(file: Path, folder: Path) -> None:
    """Write the directory of a file; it takes its place when it is whole."""
    header = read_header(file)
    fields, tokenizer = config_fields(header), _tokenizer(header)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        tokenizer.save_pretrained(made)
        (made / LINK).symlink_to(file)
        if not _cuts_text_by_known_rules(header):
            (made / _NOTICE).write_text(
                f"{file} cuts text by the rules of {header.values['tokenizer.ggml.pre']!r}, which are not known, and "
                "is read with GPT-2's; give another tokenizer with --tokenizer if its tokens differ"
            )
        (made / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        if not folder.exists():  # another process may have been as quick
            os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _cuts_text_by_known_rules(header: Header) -> bool:
    """Return whether text is cut before byte-pair encoding by rules that the tokenizer here has."""
    of_bytes = header.values.get("tokenizer.ggml.model") == "gpt2"
    return not of_bytes or header.values.get("tokenizer.ggml.pre", "default") in _PRE_TOKENIZERS


@cache
def _place() -> Path:
    """Folder of all descriptions; one of this process where there is no cache folder, or none that can be written."""
    caches = cache_folder()
    if caches is not None:
        try:
            (caches / "gguf").mkdir(parents=True, exist_ok=True)
        except OSError:
            caches = None
    if caches is not None and os.access(caches / "gguf", os.W_OK):
        return caches / "gguf"
    return Path(tempfile.mkdtemp(prefix="jaxrlhf_gguf_"))


def _tokenizer(header: Header) -> "PreTrainedTokenizerBase":
    """The tokenizer in a GGUF file, as transformers makes it, with the file's chat template if it has one.

    Raises:
      Refusal: The file has no tokenizer, or one that transformers does not make.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    given = {key.removeprefix("tokenizer."): value for key, value in header.values.items()}
    given |= {f"ggml.{name}": listed for name, listed in header.tokens.items()}
    names, tokens = GGUF_TOKENIZER_MAPPING["tokenizer"], header.tokens.get("tokens", [])
    kind, cut = given.get("ggml.model"), given.get("ggml.pre", "default")
    special = {name: given.get(f"ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    try:
        renamed = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
        backend, _ = convert_gguf_tokenizer(header.architecture, renamed)
        special = {name: tokens[number] for name, number in special.items() if number is not None}
    except Exception as error:  # what transformers and tokenizers raise of such files has no class of its own
        raise Refusal(
            f"transformers makes no tokenizer of {header.file} ({reason_of(error)}); give the directory with the "
            "model's safetensors and tokenizer.json"
        ) from error
    if kind == "gpt2" and cut == _SMOLLM:  # made as GPT-2's, which cuts line breaks before a digit apart
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=given.get("chat_template"),
        # SentencePiece vocabularies of older files begin with BOS without saying so.
        add_bos_token=given.get("ggml.add_bos_token", kind == "llama"),
        add_eos_token=given.get("ggml.add_eos_token", False),
        clean_up_tokenization_spaces=False,
        **special,
    )
