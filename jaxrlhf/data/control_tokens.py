"""Control tokens that a user's text spells out: found, and kept as text where a data setting asks for it.

A tokenizer turns `<|im_end|>` in a prompt into the token that ends a turn, whoever wrote it there.
"""

import re
from collections.abc import Iterable
from typing import cast

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal

_MARK = re.compile("[\ue000-\uf8ff]")  # Unicode's private use area


class ControlTokens:
    """The control tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        texts = sorted(added | set(tokenizer.all_special_tokens))
        self._ids = dict(zip(texts, cast(list[int], tokenizer.convert_tokens_to_ids(texts)), strict=True))
        longest_first = sorted(map(re.escape, self._ids), key=len, reverse=True)
        self._spelled = re.compile("|".join(longest_first) or "(?!)")
        self._tokenizer = tokenizer

    def first_in(self, texts: Iterable[str]) -> str | None:
        """The first control token that one of the texts spells out."""
        return next((found[0] for text in texts if (found := self._spelled.search(text))), None)

    def mark(self, text: str, *, place: str) -> str:
        """The text with a mark inside every control token that it spells out, for a chat template to pass on."""
        if _MARK.search(text):
            raise Refusal(
                f"{place}: the prompt spells out a control token and holds characters of Unicode's private use area, "
                'which would mark it; take these out, or set data.control_tokens="parse"'
            )
        return self._spelled.sub(lambda found: found[0][0] + "\ue000" + found[0][1:], text)

    def encode(self, rendered: str, *, place: str) -> list[int]:
        """Token ids of a rendered prompt in which the template's control tokens are tokens and marked ones are text.

        Args:
          place: Where the prompt comes from, for error messages.

        Raises:
          Refusal: The tokenizer gives other ids to a text in parts than to the whole.
        """
        ids = self._in_parts(rendered)
        plain = _MARK.sub(" ", rendered)
        if self._in_parts(plain) != self._tokenizer.encode(plain, add_special_tokens=False):
            raise Refusal(
                f"{place}: the prompt spells out a control token, and this tokenizer cannot keep it as text, since it "
                'encodes text by what stands around it; leave the record out, or set data.control_tokens="parse"'
            )
        return ids

    def unmarked(self, text: str) -> str:
        """The text without the marks."""
        return _MARK.sub("", text)

    def _in_parts(self, rendered: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for found in self._spelled.finditer(rendered):
            ids += [*self._text(rendered[end : found.start()]), self._ids[found[0]]]
            end = found.end()
        return ids + self._text(rendered[end:])

    def _text(self, text: str) -> list[int]:
        """Token ids of text without control tokens, marks left out."""
        text = self.unmarked(text)
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []
