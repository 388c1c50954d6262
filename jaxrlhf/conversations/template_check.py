"""Check of a chat template before a run starts."""

from collections.abc import Sequence

from jaxrlhf.config import Refusal
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.tool_calls import Signatures
from jaxrlhf.episode import Message, ToolSchema


def check_template(format: ChatFormat, tools: Sequence[ToolSchema]) -> None:
    """Check the template of a run, with the run's tools.

    Raises:
      Refusal: A conversation cannot be tokenized turn by turn, or a tool's schema is wrong.
    """
    Signatures(tools)
    if not format.stop_tokens:
        raise Refusal(
            "no token ends a turn of this tokenizer's chat template, and it has no end of text; "
            'set "eos_token" in its tokenizer_config.json'
        )
    later: list[Sequence[Message]] = [[{"role": "user", "content": "?"}], format.synthetic.answers()]
    for messages in later:
        _check_parts(format, messages, tools)
    if all(format.keeps(messages, reasoning=False) for messages in later):
        _check_composition(format, tools)


def _check_parts(format: ChatFormat, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
    """Raise `Refusal` if text encoded in parts has other tokens: spelled control tokens then cannot stay text."""
    template = format.template
    text = template.render(
        [*format.synthetic.before(messages), *format.template_messages(messages)], tools, open_reply=True
    )
    if template.encode(text, marked=True) != template.encode(text, marked=False):
        raise Refusal(
            "this tokenizer encodes a text differently inside a longer text, so control tokens that a tool's answer "
            'spells cannot be kept as text; use its fast tokenizer without a prefix space ("add_prefix_space": false)'
        )


def _check_composition(format: ChatFormat, tools: Sequence[ToolSchema]) -> None:
    """Raise `Refusal` if two turns tokenized one after the other have other tokens than at once."""
    first: Message = {"role": "user", "content": "One?"}
    reply: Message = {"role": "assistant", "content": "One."}
    second: Message = {"role": "user", "content": "Two?"}
    prompt = format.prompt([first], tools)
    words = format.template.encode("One.", marked=False)
    ends = (format.end_of_turn,) if format.end_of_turn is not None else ()
    parts = (*prompt, *words, *ends, *format.delta([second], tools, ended_by=format.end_of_turn))
    whole = format.prompt([first, reply, second], tools)
    if parts == whole:
        return
    at = next((n for n, (a, b) in enumerate(zip(parts, whole, strict=False)) if a != b), min(len(parts), len(whole)))
    slices = whole[max(at - 8, 0) : at], parts[at : at + 8], whole[at : at + 8]
    before, ours, right = (str(format.tokenizer.decode(list(tokens))) for tokens in slices)
    raise Refusal(
        "this chat template gives a chat other tokens turn by turn than at once: "
        f'after {before!r} come {ours!r} instead of {right!r}; change "chat_template" or the tokenizer'
    )
