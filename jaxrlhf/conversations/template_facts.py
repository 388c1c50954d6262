"""Check of a chat template before a run starts: facts for the user, and errors."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrlhf.config import Refusal
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.tool_calls import Signatures
from jaxrlhf.episode import Message, ToolSchema


@dataclass(frozen=True)
class TemplateFacts:
    """Facts about a chat template.

    Attributes:
      family: Form in which tool calls are parsed.
      stop_tokens: Tokens that end a turn, as text.
      default_system: Text that the template puts before a chat without a system message.
      opening: Text that opens the policy's turn.
      shows_tools: True if the template shows the policy its tools.
      tool_role: Role in which a tool's answer is rendered.
      keeps_history: True if no later message changes how earlier messages are rendered, apart from reasoning.
      keeps_reasoning: True if reasoning stays when a user speaks again.
    """

    family: str
    stop_tokens: tuple[str, ...]
    default_system: str
    opening: str
    shows_tools: bool
    tool_role: str
    keeps_history: bool
    keeps_reasoning: bool

    def lines(self) -> list[str]:
        """Return the facts as lines of text for people."""
        return [
            f"a turn ends with {' or '.join(self.stop_tokens)}, and the next turn opens with {self.opening!r}",
            f"tool calls are parsed in the form {self.family}; answers of tools have the role {self.tool_role}",
            *(["the template does not show tools: the prompt has to"] if not self.shows_tools else []),
            *([f"before the first message the template writes {self.default_system!r}"] if self.default_system else []),
            *(["the template rewrites earlier turns"] if not self.keeps_history else []),
            *(["the template leaves out the reasoning of earlier turns"] if not self.keeps_reasoning else []),
        ]


def check_template(format: ChatFormat, tools: Sequence[ToolSchema]) -> TemplateFacts:
    """Return the facts about the template of a run, with the run's tools.

    Raises:
      Refusal: A conversation cannot be tokenized turn by turn, or a tool's schema is wrong.
    """
    Signatures(tools)
    synthetic, control = format.synthetic, format.template.special
    if not format.stop_tokens:
        raise Refusal(
            "no token ends a turn of this tokenizer's chat template, and it has no end of text; "
            'set "eos_token" in its tokenizer_config.json'
        )
    user: list[Message] = [{"role": "user", "content": "?"}]
    for messages in (user, synthetic.answers()):
        _check_parts(format, messages, tools)
    keeps_history = format.keeps(user, reasoning=False) and format.keeps(synthetic.answers(), reasoning=False)
    if keeps_history:
        _check_composition(format, tools)
    texts = {id: text for text, id in control.ids.items()}
    return TemplateFacts(
        family=format.family,
        stop_tokens=tuple(sorted(texts.get(id, str(id)) for id in format.stop_tokens)),
        default_system=synthetic.default_system(),
        opening=synthetic.opening(),
        shows_tools=not tools or synthetic.shows(tools),
        tool_role=synthetic.tool_role,
        keeps_history=keeps_history,
        keeps_reasoning=format.keeps(user, reasoning=True),
    )


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
