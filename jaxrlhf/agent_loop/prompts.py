"""Records that episodes begin with: the tools that their prompts show, and solutions of several turns."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import AnyEnvironment, Refusal, Tools
from jaxrlhf.config.environments import choice, choices
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.template_facts import check_template
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import EnvironmentFailure, Message, ToolSchema

_ASKED: Message = {"role": "user", "content": "?"}


class EpisodePrompts:
    """Reading of records for an environment.

    Raises:
      Refusal: An environment that does not load, or a chat template that episodes cannot go by.
    """

    def __init__(self, environment: AnyEnvironment, tokenizer: PreTrainedTokenizerBase) -> None:
        self._environment, self._format = environment, ChatFormat(tokenizer)
        self._tools = tools_shown(environment)
        for tools in self._tools:
            check_template(self._format, tools)

    def tools(self, record: Mapping[str, Any]) -> Sequence[ToolSchema]:
        """Schemas of the tools beside a record's own prompt; those of a class come with its first observation."""
        return self._tools[choice(self._environment, record)]

    def demonstrated(
        self, prompt: Sequence[Message], solution: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a solution of several turns as they follow the prompt, and which of them the policy chooses.

        Raises:
          Refusal: A solution that does not begin and end with the assistant's words.
        """
        if not solution or solution[0].get("role") != "assistant" or solution[-1].get("role") != "assistant":
            raise Refusal(
                "a solution of several turns begins and ends with a message of the assistant, got the roles "
                f"{[message.get('role') for message in solution]}"
            )
        ids: list[int] = []
        mask: list[bool] = []
        told: list[Message] = []
        for message in solution:
            if message["role"] != "assistant":
                told.append(message)
                continue
            if ids:
                between = self._between(told, tools, ended_by=ids[-1])
                ids, mask, told = [*ids, *between], [*mask, *[False] * len(between)], []
            drawn = self._written(message, tools)
            ids, mask = [*ids, *drawn], [*mask, *[True] * len(drawn)]
        return ids, mask

    def _between(self, told: Sequence[Message], tools: Sequence[ToolSchema], *, ended_by: int) -> Sequence[int]:
        """Tokens between two replies of a demonstration."""
        try:
            return self._format.delta(told, tools, ended_by=ended_by)
        except EnvironmentFailure as error:
            raise Refusal(f"a demonstration cannot be written: {error.detail}") from error

    def _written(self, message: Message, tools: Sequence[ToolSchema]) -> Sequence[int]:
        """Tokens that the policy would draw to say a message, the end of its turn included."""
        template = self._format.template
        try:
            [said] = self._format.told([message])
            opened = template.render([_ASKED], tools, open_reply=True)
            whole = template.render([_ASKED, said], tools, open_reply=False)
        except EnvironmentFailure as error:
            raise Refusal(f"a demonstration cannot be written: {error.detail}") from error
        if not whole.startswith(opened):
            raise Refusal(
                "the tokenizer's chat template writes an assistant's message in another place than where it opens the "
                "assistant's turn, so a demonstration cannot be cut from it; give solutions of one turn, as text"
            )
        ids = template.encode(whole[len(opened) :], marked=False)
        ends = [place for place, token in enumerate(ids) if token in self._format.stop_tokens]
        if not ends:
            raise Refusal("the tokenizer's chat template ends no turn of the assistant, so nothing ends a reply")
        return ids[: ends[0] + 1]


def tools_shown(environment: AnyEnvironment) -> list[Sequence[ToolSchema]]:
    """Schemas of each environment's functions, read in a process of its own, as user code is."""
    functions = [one for one in choices(environment) if isinstance(one, Tools)]
    if not functions:
        return [()] * len(choices(environment))
    with closing(EnvironmentPool(tuple(functions))) as pool:
        shown = iter([pool.start(number, number, {}, 0).result().tools for number in range(len(functions))])
    return [next(shown) if isinstance(one, Tools) else () for one in choices(environment)]
