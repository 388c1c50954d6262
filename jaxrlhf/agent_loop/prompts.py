"""Prompts and demonstrations of episodes: the tools that prompts show, and the tokens of multi-turn solutions."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import AnyEnvironment, Refusal, Tools
from jaxrlhf.config.environments import choice, choices
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.template_check import check_template
from jaxrlhf.data.chats.rendered import RenderedChats
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import EnvironmentFailure, Message, ToolSchema

_QUESTION: Message = {"role": "user", "content": "?"}


class EpisodePrompts:
    """Reader of data records for the episodes of an environment.

    Raises:
      Refusal: The environment does not load, or the chat template does not support episodes.
    """

    def __init__(self, environment: AnyEnvironment, tokenizer: PreTrainedTokenizerBase) -> None:
        self._environment, self._format = environment, ChatFormat(tokenizer)
        self._chats = RenderedChats(tokenizer, self._format.template.special)
        self._tools = tools_shown(environment)
        for tools in self._tools:
            check_template(self._format, tools)

    def tools(self, record: Mapping[str, Any]) -> Sequence[ToolSchema]:
        """Return the tool schemas shown with a record's prompt; an environment class sends its tools in `Opening`."""
        return self._tools[choice(self._environment, record)]

    def demonstrated(
        self, solution: Sequence[Message], tools: Sequence[ToolSchema], *, place: str
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a multi-turn solution after the prompt, and the mask of the policy's tokens.

        Args:
          solution: Messages that begin and end with the assistant's.
          place: Origin of the solution, for error messages.

        Raises:
          Refusal: The chat template cannot render the solution.
        """
        ids: list[int] = []
        mask: list[bool] = []
        messages: list[Message] = []
        for message in solution:
            if message["role"] != "assistant":
                messages.append(message)
                continue
            try:
                between = self._format.delta(messages, tools, ended_by=ids[-1]) if ids else ()
                [given] = self._format.template_messages([message])
            except EnvironmentFailure as error:
                raise Refusal(f"{place}: the chat template cannot render a demonstration: {error.detail}") from error
            [turn] = self._chats.answer([_QUESTION], [given], tools, place=place)
            reply = self._format.template.encode(turn.text, marked=False)
            if reply[-1] not in self._format.stop_tokens:
                raise Refusal(
                    f"{place}: the tokenizer's chat template does not end the assistant's turn, so a reply cannot end; "
                    "use another chat template"
                )
            ids, mask = [*ids, *between, *reply], [*mask, *[False] * len(between), *[True] * len(reply)]
            messages = []
        return ids, mask


def tools_shown(environment: AnyEnvironment) -> list[Sequence[ToolSchema]]:
    """Return the schemas of each environment's tool functions, read in a separate process because it is user code."""
    functions = [one for one in choices(environment) if isinstance(one, Tools)]
    if not functions:
        return [()] * len(choices(environment))
    with closing(EnvironmentPool(tuple(functions))) as pool:
        shown = iter([pool.start(number, number, {}, 0).result().tools for number in range(len(functions))])
    return [next(shown) if isinstance(one, Tools) else () for one in choices(environment)]
