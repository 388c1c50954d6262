"""Prompts and demonstrations of episodes: the tools that prompts show, and the tokens of multi-turn solutions."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import AnyEnvironment, Refusal, Tools
from jaxrlhf.config.environments import choice, choices
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.template_facts import check_template
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
        self._tools = tools_shown(environment)
        for tools in self._tools:
            check_template(self._format, tools)

    def tools(self, record: Mapping[str, Any]) -> Sequence[ToolSchema]:
        """Return the tool schemas shown with a record's prompt; an environment class sends its tools in `Opening`."""
        return self._tools[choice(self._environment, record)]

    def demonstrated(
        self, prompt: Sequence[Message], solution: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[list[int], list[bool]]:
        """Return the token ids of a multi-turn solution after the prompt, and the mask of the policy's tokens.

        Raises:
          Refusal: The solution does not start and end with an assistant message, or the chat template cannot render it.
        """
        if not solution or solution[0].get("role") != "assistant" or solution[-1].get("role") != "assistant":
            raise Refusal(
                "a multi-turn solution must start and end with an assistant message, got the roles "
                f"{[message.get('role') for message in solution]}"
            )
        ids: list[int] = []
        mask: list[bool] = []
        messages: list[Message] = []
        for message in solution:
            if message["role"] != "assistant":
                messages.append(message)
                continue
            if ids:
                with _refused():
                    between = self._format.delta(messages, tools, ended_by=ids[-1])
                ids, mask, messages = [*ids, *between], [*mask, *[False] * len(between)], []
            reply = self._reply_tokens(message, tools)
            ids, mask = [*ids, *reply], [*mask, *[True] * len(reply)]
        return ids, mask

    def _reply_tokens(self, message: Message, tools: Sequence[ToolSchema]) -> Sequence[int]:
        """Return the tokens that the policy would sample to write a message, including its end-of-turn token."""
        template = self._format.template
        with _refused():
            [rendered] = self._format.template_messages([message])
            opened = template.render([_QUESTION], tools, open_reply=True)
            whole = template.render([_QUESTION, rendered], tools, open_reply=False)
        if not whole.startswith(opened):
            raise Refusal(
                "the tokenizer's chat template renders an assistant message differently from an opened assistant "
                "turn, so demonstrations cannot be tokenized; use single-turn solutions as text"
            )
        ids = template.encode(whole[len(opened) :], marked=False)
        ends = [place for place, token in enumerate(ids) if token in self._format.stop_tokens]
        if not ends:
            raise Refusal(
                "the tokenizer's chat template does not end the assistant's turn, so a reply cannot end; use another "
                "chat template"
            )
        return ids[: ends[0] + 1]


@contextmanager
def _refused() -> Iterator[None]:
    """Turn an error of the chat template into a refusal of the demonstration."""
    try:
        yield
    except EnvironmentFailure as error:
        raise Refusal(f"the chat template cannot render a demonstration: {error.detail}") from error


def tools_shown(environment: AnyEnvironment) -> list[Sequence[ToolSchema]]:
    """Return the schemas of each environment's tool functions, read in a separate process because it is user code."""
    functions = [one for one in choices(environment) if isinstance(one, Tools)]
    if not functions:
        return [()] * len(choices(environment))
    with closing(EnvironmentPool(tuple(functions))) as pool:
        shown = iter([pool.start(number, number, {}, 0).result().tools for number in range(len(functions))])
    return [next(shown) if isinstance(one, Tools) else () for one in choices(environment)]
