"""Control tokens spelled out in a user's text: finds them, and encodes them as text if a data setting says so.

A tokenizer turns `<|im_end|>` in a prompt into the token that ends a turn, no matter who wrote the text.
"""

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache
from itertools import takewhile
from typing import cast

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal

_MARK = re.compile("[\ue000\ue001]")  # in Unicode's private use area; a tag is encoded in two parts, split at U+E001
_TAG_MARK = "\ue001"


@lru_cache(maxsize=8)
def tokenizer_of_text(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that encodes control tokens as text.

    This mode is a state of the tokenizer. Switching the mode of a shared tokenizer would change the tokens that other
    threads encode at that moment.
    """
    copy = deepcopy(tokenizer)
    copy.encode("a", split_special_tokens=True)
    return copy


def prefix_of_both(one: str, other: str) -> str:
    """Return the longest text with which both texts begin."""
    same = (a == b for a, b in zip(one, other, strict=False))
    return one[: sum(takewhile(bool, same))]


class ControlTokens:
    """Control tokens of a tokenizer.

    Attributes:
      ids: Token ids by the text of the token.

    Args:
      tags: Further tokens of the vocabulary that have a meaning in chats, such as `<tool_call>`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: Iterable[str] = ()) -> None:
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, token in added.items() if token.special} | set(tokenizer.all_special_tokens)
        self._tags = set(tags) - special
        texts = sorted(special | self._tags)
        self.ids = dict(zip(texts, cast(list[int], tokenizer.convert_tokens_to_ids(texts)), strict=True))
        self._left = {text for text, token in added.items() if token.lstrip}
        self._right = {text for text, token in added.items() if token.rstrip}
        longest_first = sorted(map(re.escape, self.ids), key=len, reverse=True)
        self._spelled = re.compile("|".join(longest_first) or "(?!)")
        self._tokenizer = tokenizer

    def first_in(self, texts: Iterable[str]) -> str | None:
        """Return the first control token that one of the texts spells out; None if there is none."""
        return next((found[0] for text in texts if (found := self._spelled.search(text))), None)

    def found_in(self, text: str) -> Iterator[re.Match[str]]:
        """Find the control tokens that a text spells out, in order."""
        return self._spelled.finditer(text)

    def closing(self, last: str, followed: str) -> list[re.Match[str]]:
        """Find the control tokens that a chat template writes after a reply to end its turn.

        They are in the text whether or not a message follows: Phi writes a further token at the end of a chat. If the
        texts have none in common, the first one after the last reply ends the turn: gpt-oss ends the last turn with
        another token than earlier turns.

        Args:
          last: Text after the last reply of a chat.
          followed: Text after the reply if a message follows.
        """
        return [*self.found_in(prefix_of_both(last, followed))] or [*self.found_in(last)][:1]

    def mark(self, text: str, *, place: str) -> str:
        """Return the text with a mark inside every control token that it spells out; chat templates keep marks.

        Raises:
          Refusal: The text contains the characters of marks.
        """
        if _MARK.search(text):
            raise Refusal(
                f"{place}: the prompt spells out a control token and contains U+E000 or U+E001, private characters "
                'that mark control tokens; remove them, or set data.control_tokens="parse"'
            )
        return self._spelled.sub(self._mark, text)

    def _mark(self, found: re.Match[str]) -> str:
        return found[0][0] + (_TAG_MARK if found[0] in self._tags else "\ue000") + found[0][1:]

    def encode(self, rendered: str, *, place: str) -> list[int]:
        """Return the token ids of a rendered prompt; marked control tokens become text, all others become tokens.

        Args:
          place: Origin of the prompt, for error messages.

        Raises:
          Refusal: The tokenizer encodes the parts of a text differently from the whole text.
        """
        ids = self.in_parts(rendered)
        plain = _MARK.sub(" ", rendered)
        if self.in_parts(plain) != self._tokenizer.encode(plain, add_special_tokens=False):
            raise Refusal(
                f"{place}: the prompt spells out a control token, and this tokenizer cannot keep it as text, because "
                "it encodes a text differently inside a longer text; leave the record out, or set "
                'data.control_tokens="parse"'
            )
        return ids

    def unmarked(self, text: str) -> str:
        """Return the text without marks."""
        return _MARK.sub("", text)

    def in_parts(self, rendered: str) -> list[int]:
        """Return token ids as `encode` does, for a tokenizer that is known to encode texts in parts."""
        ids: list[int] = []
        end = 0
        for found in self.found_in(rendered):
            before = rendered[end : found.start()]
            ids += [*self._text(before.rstrip() if found[0] in self._left else before), self.ids[found[0]]]
            end = found.end()
            while found[0] in self._right and rendered[end : end + 1].isspace():
                end += 1
        return ids + self._text(rendered[end:])

    def _text(self, text: str) -> list[int]:
        """Return the token ids of text without control tokens; marks are removed, marked tags become two parts."""
        parts = map(self.unmarked, text.split(_TAG_MARK))
        encode = tokenizer_of_text(self._tokenizer).encode
        return [n for part in parts if part for n in encode(part, add_special_tokens=False, split_special_tokens=True)]
