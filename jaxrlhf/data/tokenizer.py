"""Tokenizers in Hugging Face format: any that transformers loads, and a small embedded one."""

import codecs
import re
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.arithmetic import lexicon

_PROBE = "Tom has 12 apples (3 red).\n12-3=9\n#### 9"
_PROBES = (_PROBE, "if a:\n\n\t\tb  # c\r\n    d\n\n\n", "Ça va? 你好, №3 — it's 1_000 e\u0301")
"""Texts to compare two tokenizers: different tokenizers give different ids."""

_PAD, _BOS, _EOS = "<|pad|>", "<|bos|>", "<|eos|>"
_SPECIAL = (_PAD, _BOS, _EOS, "<|system|>", "<|user|>", "<|assistant|>")
# One digit, one word with the space before it, a run of `#`, or any other character.
_PIECE = r"\d| ?\p{L}+|#+|[^\d\p{L}#]"
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    # Tool messages have the role of the system, so that the vocabulary needs no token for them.
    "{{ '<|' + ('system' if message.role == 'tool' else message.role) + '|>' + message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{ '<<' + (call.function.name + ': ' if not tools or tools | length > 1 else '') }}"
    "{{ call.function.arguments.values() | join(', ') + '>>' }}"
    "{%- endfor -%}"
    "{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""Chat template; tool calls are `<<47*86>>`, like GSM8K's calculator marks (Cobbe et al., arXiv:2110.14168)."""
SEEING = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Additional special tokens of a vision model."""
_DAY = date(2024, 7, 26)
"""Date that chat templates print as today's, fixed so that prompts have the same tokens in every run."""
_TODAY = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
"""Pattern of today's date in a chat template."""
_CONTEXT_TOKENS = 32_768
_CHARACTER_BYTES = 4
_LETTERS = "é日"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PIECE_TOKENS = 8


def _letters_of_bytes() -> list[str]:
    """Return the letter by which a byte-level vocabulary writes each byte; from U+0100 on for invisible characters."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


_LETTER_OF_BYTE = _letters_of_bytes()
_BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(_LETTER_OF_BYTE)}


def load_tokenizer(path: str | None, *, vision: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or hub id; None is the embedded one, with image tokens if `vision` is set.

    A chat template and a pad token may be missing. Without a template prompts are plain text. No pad id is needed,
    because lengths tell padding from tokens.

    Raises:
      Refusal: Nothing can be loaded, there is no EOS, encoding and decoding change a text, or ids differ from those of
        the tokenizer.json.
    """
    if path is None:
        return embedded_tokenizer(vision=vision)
    from transformers import AutoTokenizer, PreTrainedConfig  # imports torch if installed, which takes seconds

    try:
        # Without the blank configuration AutoTokenizer may pick a class by the model's config.json and ignore the
        # tokenizer's own files, as it does for Qwen2.
        tokenizer = AutoTokenizer.from_pretrained(path, config=PreTrainedConfig(), trust_remote_code=False)
    except Exception as error:  # the package tokenizers raises plain Exception for an unreadable file
        if "custom code" in str(error):
            raise Refusal(
                f"the tokenizer of {path!r} is Python code, which is not run here; if you trust its author, load it by "
                "transformers with trust_remote_code=True, and give the folder that its save_pretrained writes"
            ) from error
        files = sorted(file.name for file in Path(path).iterdir())[:8] if Path(path).is_dir() else None
        reason = reason_of(error) if files is None else f"it contains {', '.join(files) or 'nothing'}"
        if files and "tokenizer.json" in files:
            reason = f"its tokenizer.json: {reason_of(error)}"
        raise Refusal(
            f"no tokenizer could be loaded from {path!r} ({reason}); give a directory with "
            "tokenizer.json and tokenizer_config.json, or a hub id that can be reached"
        ) from error
    tokenizer.clean_up_tokenization_spaces = False  # decoding keeps spaces before punctuation
    _check(tokenizer, path)
    return tokenizer


def misread(directory: str | Path) -> str | None:
    """Return a warning if `AutoTokenizer` loads the tokenizer of a checkpoint wrongly; None if it loads it correctly.

    For some models, including Qwen2, transformers builds the model family's tokenizer from the vocabulary and ignores
    the other settings in the tokenizer's files.
    """
    from transformers import AutoTokenizer

    ids = load_tokenizer(str(directory)).encode(_PROBE)
    try:
        found = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        wrong = None if found.encode(_PROBE) == ids else f"makes a {type(found).__name__} with other ids"
    except Exception as error:  # the family's tokenizer class may fail in any way on these files
        wrong = f"cannot load it ({reason_of(error)})"
    advice = f"load it with transformers.PreTrainedTokenizerFast.from_pretrained({str(directory)!r})"
    return None if wrong is None else f"of the tokenizer: transformers.AutoTokenizer {wrong}; {advice}"


def embedded_tokenizer(*, vision: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer for the arithmetic problems that also encodes any other text; nothing is downloaded.

    The vocabulary is the 256 bytes and every word of the arithmetic problems, together with the space before the word.
    Text is split into words, single digits, runs of `#` and other single characters. A word outside the vocabulary
    becomes its bytes.

    Args:
      vision: Adds the special tokens of a vision model after all others.
    """
    split = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = pre_tokenizers.Sequence([split, to_bytes])
    single_bytes = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {piece for text in lexicon() for piece, _ in pieces.pre_tokenize_str(text)}
    vocabulary = [*_SPECIAL, *single_bytes, *sorted(words - set(single_bytes))]

    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        additional_special_tokens=[*_SPECIAL[3:], *(SEEING if vision else ())],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=_CONTEXT_TOKENS,
    )


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, without special tokens."""

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    return decode


class TokenBytes:
    """Bytes of single tokens; the bytes of a text's tokens, joined, are the bytes of the text.

    A tokenizer's decoder cannot be used token by token: for an incomplete character or run of byte tokens the decoder
    also replaces valid bytes by U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._added = {id: str(token).encode() for id, token in added.items()}
        pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(_LETTERS, add_special_tokens=False))
        letters = "".join(_LETTER_OF_BYTE[byte] for byte in _LETTERS.encode())
        self._byte_level = letters in "".join(map(str, pieces))
        ordinary = (id for id in range(len(tokenizer)) if id not in self._special and id not in self._added)
        self._before = next((id for id in ordinary if self._decode([id]).isalpha()), None)
        self._known: dict[tuple[int, bool], bytes] = {}

    def of(self, token: int, *, first: bool) -> bytes:
        """Return the bytes of a token; empty for a special token.

        Args:
          first: True if no other token precedes it; a tokenizer may then leave out a leading space.
        """
        if (found := self._known.get((token, first))) is None:
            found = self._known[token, first] = b"" if token in self._special else self._bytes(token, first=first)
        return found

    def joined(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of a text from its tokens."""
        parts: list[bytes] = []
        first = True
        for token in tokens:
            parts.append(self.of(token, first=first))
            first = first and token in self._special
        return b"".join(parts)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones; only bytes that are no valid character become U+FFFD."""
        return self.joined(tokens).decode(errors="replace")

    def name(self, token: int) -> str:
        """Return the token as the vocabulary writes it."""
        return str(self._tokenizer.convert_ids_to_tokens(token) or "")

    def is_special(self, token: int) -> bool:
        """Return True for control tokens, which are not part of the text."""
        return token in self._special

    def _bytes(self, token: int, *, first: bool) -> bytes:
        if token in self._added:
            return self._added[token]
        name = self.name(token)
        if self._byte_level:
            found = [_BYTE_OF_LETTER.get(letter) for letter in name]
            return name.encode() if None in found else bytes(byte for byte in found if byte is not None)
        if _BYTE_TOKEN.fullmatch(name) and self._decode([token]) != name:
            return bytes.fromhex(name[3:5])
        if first or self._before is None:
            return self._decode([token]).encode()
        return self._decode([self._before, token])[len(self._decode([self._before])) :].encode()

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class TextBytes:
    """Incremental decoder of UTF-8; bytes of an incomplete character wait for the next bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, new: bytes) -> str:
        """Return the text that is complete with these bytes."""
        return self._decoder.decode(new)

    def end(self) -> str:
        """Return the remaining bytes as U+FFFD and reset the decoder."""
        return self._decoder.decode(b"", final=True)


TEMPLATE_ERRORS = (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError)
"""Exceptions by which chat templates reject messages."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[Any],
    *,
    tools: list[Any] | None = None,
    day: date | None = _DAY,
    **settings: Any,
) -> Any:
    """Render a chat, or each of several chats, with the tokenizer's chat template.

    Args:
      day: Date that the template prints as today's; None is the real date.
      settings: Further arguments of `apply_chat_template`, and variables of the template.
    """
    template = tokenizer.get_chat_template(tools=tools)
    if day is not None:
        template = _TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
    return tokenizer.apply_chat_template(chat, tools=tools, chat_template=template, tokenize=False, **settings)


def pieces_of(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text that each token adds; a character belongs to the token that completes its bytes."""
    pieces: list[str] = []
    first = read = 0
    starts = [0]  # token indices between characters, because a window that starts inside a character changes the text
    for end in range(1, len(tokens) + 1):
        # Decode with a few tokens before it, because a tokenizer may decode the first token of a text differently.
        before, text = decode(tokens[first:read]), decode(tokens[first:end])
        if text.endswith("\ufffd") and end < len(tokens) and end - read < _CHARACTER_BYTES:
            pieces.append("")
            continue
        # A tokenizer with byte tokens decodes the characters before a cut one to replacement characters, too.
        pieces.append(text[len(before) :] if text.startswith(before) else "\ufffd")
        read = end
        recent = [place for place in starts if place > end - 2 * _PIECE_TOKENS]
        starts = [end] if text.endswith("\ufffd") else [*recent, end]  # a new window after bytes that are no character
        first = next((place for place in reversed(starts) if place <= end - _PIECE_TOKENS), starts[0])
    return pieces


def _check(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    if tokenizer.eos_token_id is None:
        raise Refusal(
            f"the tokenizer of {path!r} has no end-of-sequence token, so responses cannot end; "
            'set "eos_token" in its tokenizer_config.json'
        )
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    text = tokenizer.decode(ids)
    if text != _PROBE:
        raise Refusal(f"the tokenizer of {path!r} turns {_PROBE!r} into {text!r}; check its tokenizer.json")
    file = Path(path) / "tokenizer.json"
    if file.is_file() and _ids_by_file(file) != [tokenizer.encode(one, add_special_tokens=False) for one in _PROBES]:
        raise Refusal(
            f"{type(tokenizer).__name__}, loaded from {path!r}, gives other ids than the tokenizer.json of the folder; "
            'set "tokenizer_class" in its tokenizer_config.json to "PreTrainedTokenizerFast"'
        )


def _ids_by_file(file: Path) -> list[list[int]]:
    """Return the ids of the probes by a tokenizer.json alone, without the padding and truncation that it declares."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [tokenizer.encode(probe, add_special_tokens=False).ids for probe in _PROBES]
