"""Answers in JSON of a schema: llguidance says after every token which tokens may follow."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrlhf.serving.errors import invalid, unsupported

logger = logging.getLogger(__name__)

LARGEST_SCHEMA = 1 << 17
"""Largest number of characters of a schema, which each choice of a request compiles. OpenAI's API admits 120,000."""


class JsonGrammars:
    """Grammars over the tokens of one Hugging Face tokenizer.

    Raises:
      ApiError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise unsupported(
                "response_format needs the package llguidance; pip install 'jaxrlhf[serve]' where the server runs",
                "response_format",
            ) from error
        self._tokens, self._vocab = from_tokenizer(tokenizer), len(tokenizer)

    def constraint(self, schema: Mapping[str, Any], stop_tokens: Sequence[int]) -> "JsonConstraint":
        """Return the constraint of one response, which is JSON of the schema and then a stop token.

        Raises:
          ApiError: The schema is too large, or llguidance cannot follow it.
        """
        from llguidance import LLMatcher

        text = json.dumps(schema)
        if len(text) > LARGEST_SCHEMA:
            message = f"response_format: a schema of {len(text)} characters; expected at most {LARGEST_SCHEMA}"
            raise invalid(message, "response_format")
        # The separators of `json.dumps`: a small policy may write spaces without end.
        grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise invalid(f"response_format: {matcher.get_error().splitlines()[0]:.300}", "response_format")
        return JsonConstraint(matcher, self._vocab, stop_tokens)


class JsonConstraint:
    """Constraint of a response to a grammar of llguidance; see `jaxrlhf.engine.constraints.TokenConstraint`.

    If llguidance gives up, such as on a schema that exceeds its limits, the response ends with a stop token.
    """

    def __init__(self, matcher: Any, vocab: int, stop_tokens: Sequence[int]) -> None:
        self._matcher, self._words, self._stop_tokens = matcher, -(-vocab // 32), tuple(stop_tokens)

    def allowed(self) -> np.ndarray:
        """Return the mask of the tokens that may come next; stop tokens may once the JSON is complete."""
        from llguidance.numpy import fill_next_token_bitmask

        bits_1U = np.zeros((1, self._words), np.int32)
        if not self._matcher.is_stopped():
            fill_next_token_bitmask(self._matcher, bits_1U)
        bits_U = bits_1U[0].view(np.uint32)
        ends = self._matcher.is_accepting() or self._matcher.is_error()
        for token in self._stop_tokens:
            bit = np.uint32(1 << token % 32)
            bits_U[token // 32] = bits_U[token // 32] | bit if ends else bits_U[token // 32] & ~bit
        return bits_U

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        if token not in self._stop_tokens and not self._matcher.consume_token(token):
            reason = self._matcher.get_error().splitlines()[0]  # the next lines are the whole state of the grammar
            logger.warning("a grammar ended its response early: %.300s", reason)
