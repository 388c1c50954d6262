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
    status = file.stat()
    return _directory(file.absolute(), status.st_size, status.st_mtime_ns)


@cache
def _directory(file: Path, size: int, written_ns: int) -> Path:
    digest = hashlib.blake2b(f"{file} {size} {written_ns} {_VERSION}".encode(), digest_size=8).hexdigest()
    folder = _place() / f"{file.stem}-{digest}"
    if (folder / "config.json").is_file():
        return folder
    header = read_header(file)
    fields, tokenizer = config_fields(header), _tokenizer(header)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        tokenizer.save_pretrained(made)
        (made / LINK).symlink_to(file)
        (made / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        if not folder.exists():  # another process may have been as quick
            os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


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
    elif kind == "gpt2" and cut not in _PRE_TOKENIZERS:
        warnings.warn(
            f"{header.file} cuts text by the rules of {cut!r}, which are not known, and is read with GPT-2's; give "
            "another tokenizer with --tokenizer if its tokens differ",
            RuntimeWarning,
            stacklevel=2,
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
