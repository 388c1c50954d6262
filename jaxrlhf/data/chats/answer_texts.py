"""Text answers as a chat template renders them, from the opening of the assistant's turn to its end."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.tokenizer import render_chat

_ERRORS = (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError)
_USER = {"role": "user", "content": "?"}
_WORD = "wq7vanswer"
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class AnswerTexts:
    """Text answers to train on, rendered by a tokenizer's chat template.

    Args:
      control: The tokenizer's special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self._tokenizer, self._control = tokenizer, control

    @cached_property
    def end(self) -> int:
        """Token id that ends an answer: the first special token that the template writes after it, else EOS."""
        if self._tokenizer.chat_template is None:
            return cast(int, self._tokenizer.eos_token_id)
        found = next(self._control.found_in(self._after), None)
        return cast(int, self._tokenizer.eos_token_id) if found is None else self._control.ids[found[0]]

    def written(self, answers: Sequence[tuple[str, str]]) -> list[str]:
        """Return each answer as rendered after the opening of the assistant's turn, without the end of the turn.

        An answer that contains its thinking, `...</think>`, keeps the thinking even if the template would drop it.

        Args:
          answers: Texts, each with its place for error messages.

        Raises:
          Refusal: The template rejects an answer, drops a part of it, or opens a thinking block that it does not close.
        """
        if self._tokenizer.chat_template is None or not answers:
            return [text for text, _ in answers]
        try:
            rendered = self._render([text for text, _ in answers])
        except _ERRORS as error:
            if len(answers) > 1:  # render them one by one, to name the failing answer
                return [self.written([one])[0] for one in answers]
            place = answers[0][1]
            raise Refusal(f"{place}: the tokenizer's chat template refuses this answer: {reason_of(error)}") from error
        return [self._behind(text, whole, place) for (text, place), whole in zip(answers, rendered, strict=True)]

    def _behind(self, text: str, whole: str, place: str) -> str:
        opens = next((begin for begin, _ in _THINKING if self._opened.rstrip().endswith(begin)), "")
        kept = text in whole or _letters(text) in _letters(whole)
        if not (kept and whole.startswith(self._opened)) and any(end in text for _, end in _THINKING):
            begun = text.lstrip()
            return begun.removeprefix(opens).lstrip("\n") if opens and begun.startswith(opens) else text
        if not whole.startswith(self._opened):
            begins = f"opens {opens!r} in it" if opens else f"opens it with {self._opened[-20:]!r}"
            raise Refusal(
                f"{place}: the chat template writes an answer in another place than where it opens the assistant's "
                f"turn, and {begins}, so the answer would be learned there; give the answer with its thinking, "
                "'...</think>...', or mend the template"
            )
        if not kept or not whole.endswith(self._after):
            raise Refusal(
                f"{place}: the chat template does not write the answer {text!r:.40} as it stands; leave the record "
                "out, or mend the template"
            )
        found = next(self._control.found_in(self._after), None)
        before_end = self._after if found is None else self._after[: found.start()]
        return whole[len(self._opened) : len(whole) - len(self._after)] + before_end.rstrip(
            "\n" if found is None else ""
        )

    @cached_property
    def _opened(self) -> str:
        return cast(str, render_chat(self._tokenizer, [_USER], add_generation_prompt=True))

    @cached_property
    def _after(self) -> str:
        """Text that the template writes after an answer."""
        [whole] = self._render([_WORD])
        return whole.rpartition(_WORD)[2]

    def _render(self, texts: Sequence[str]) -> list[str]:
        chats: list[Any] = [[_USER, {"role": "assistant", "content": text}] for text in texts]
        return cast(list[str], render_chat(self._tokenizer, chats))


def _letters(text: str) -> str:
    """Return the text without whitespace, which templates change at the ends of thinking and answer."""
    return "".join(text.split())
