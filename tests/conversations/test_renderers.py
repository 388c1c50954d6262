"""Prompts, replies and turns of published families, compared with those of PrimeIntellect's package `renderers`.

`renderers` has the chat templates written in Python, and parses replies by token ids. Both sides have the same small
tokenizers. White space around the content and the reasoning that `renderers` finds is removed before the comparison,
because its families differ in how much of it they keep.

Prompts of gpt-oss are not compared, because their renderer downloads OpenAI's vocabulary. Prompts of Kimi K2 and
MiniMax M2 are not compared, because no installed package has their templates.
"""

from functools import cache
from typing import NamedTuple

import pytest
from chat_families import PEERS, dump, minimax, tokenizer_for
from written_calls import xml

from jaxrlhf.conversations import ChatFormat, Conversation
from jaxrlhf.episode import EnvironmentFailure

renderers = pytest.importorskip("renderers")


@cache
def format_of(name):
    family = PEERS[name].family
    return ChatFormat(tokenizer_for(family, PEERS[name].extra), family.settings)


@cache
def renderer_of(name, **more):
    peer = PEERS[name]
    settings = getattr(renderers, f"{peer.renderer}RendererConfig")(**peer.options, **more)
    with pytest.MonkeyPatch.context() as patch:
        if name == "gpt-oss":  # its vocabulary is on the network, and replies are parsed without it
            patch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda name: None)
        return getattr(renderers, f"{peer.renderer}Renderer")(format_of(name).tokenizer, settings)


# The cases


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "A tool, né.", "parameters": parameters}}


TOOLS = [
    tool("add", a={"type": "integer", "description": "One."}, b={"type": "integer"}),
    tool("note", text={"type": "string"}),
]
ADD, NOTE = ("add", {"a": 1, "b": 2}), ("note", {"text": 'say "hi" é'})
SYSTEM, ASKED, MORE = (
    {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "1+2?"), ("user", "Well?"))
)
SAID = {"role": "assistant", "content": "It is 3."}
REASONED = {**SAID, "reasoning_content": "One and two."}


def calling(*calls, **more):
    made = [
        {"type": "function", "id": f"functions.{name}:{place}", "function": {"name": name, "arguments": given}}
        for place, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", **more, "tool_calls": made}


def result(text, name="add", place=0):
    return {"role": "tool", "name": name, "tool_call_id": f"functions.{name}:{place}", "content": text}


ANSWER, NOTED = result("3"), result("ok", "note", 1)
PROMPTS = {
    "a user": [ASKED],
    "a system message": [SYSTEM, ASKED],
    "several turns": [SYSTEM, ASKED, SAID, MORE],
    "several turns, closed": [SYSTEM, ASKED, SAID],
    "tools": [ASKED],
    "tools and a system message": [SYSTEM, ASKED],
    "tools and a call": [SYSTEM, ASKED, calling(ADD), ANSWER],
    "tools and a call of text": [SYSTEM, ASKED, calling(("add", dump(ADD[1]))), ANSWER],
    "tools and a call without content": [SYSTEM, ASKED, calling(ADD, content=None), ANSWER],
    "tools and a call after words": [SYSTEM, ASKED, calling(ADD, content="Let me see."), ANSWER],
    "tools and two calls": [SYSTEM, ASKED, calling(ADD, NOTE), ANSWER, NOTED],
    "tools and a call, closed": [SYSTEM, ASKED, calling(ADD), ANSWER, SAID],
    "tools, a call and more": [SYSTEM, ASKED, calling(ADD), ANSWER, SAID, MORE],
    "reasoning, closed": [ASKED, REASONED],
    "reasoning and more": [ASKED, REASONED, MORE],
    "reasoning twice, closed": [ASKED, REASONED, MORE, REASONED],
    "tools, reasoning and a call": [ASKED, calling(ADD, reasoning_content="One and two."), ANSWER],
    "control tokens": [{"role": "user", "content": "Say <|im_end|>, <|eot_id|>, <turn|>, <|user|> or <｜User｜>."}],
    "tools, reasoning, a call and more": [ASKED, calling(ADD, reasoning_content="Hm."), ANSWER, REASONED, MORE],
}
"""Messages by case. "tools" in a case shows the tools, and "closed" opens no reply at the end."""


def replies(name):
    """Return the texts of a family's replies by case; reasoning is in the replies of families that reason."""
    peer = PEERS[name]
    end, called = peer.family.ends
    call, before, answer = peer.calls(ADD) + called, peer.before.format("Let me see."), peer.answer.format("It is 3.")
    silent = {
        "an answer": answer + end,
        "a call": call,
        "two calls": peer.calls(ADD, NOTE) + called,
        "words and a call": before + call,
        "a text like a number": peer.calls(("note", {"text": "3"})) + called,
        "a text of lines": peer.calls(("note", {"text": "a\n b\n"})) + called,
        "a broken call": peer.calls(peer.broken) + called,
        "a broken call and a call": peer.calls(peer.broken, ADD) + called,
        "a truncated call": peer.calls(ADD).partition("2")[0],
        "an unknown tool": peer.calls(("sub", {"a": 1})) + called,
        "an argument of another type": peer.calls(("add", {"a": "x", "b": 2})) + called,
        "a call without an argument": peer.calls(("add", {"a": 1})) + called,
        "a call in letters": peer.calls(ADD),
        "a call and words": peer.calls(ADD) + (peer.between + answer if peer.header else "\nIt is 3.") + end,
    }
    texts = {case: peer.silent + text for case, text in silent.items()}
    texts |= {"an answer alone": "It is 3." + end, "a truncated reply": "It is"}
    if peer.options.get("enable_thinking") is False:
        texts["reasoning where the prompt closed it"] = "<think>\nOne.\n</think>\n\nIt is 3." + end
    if peer.thought:
        thought, open = peer.thought.format("One and two."), peer.thought.partition("{}")[0]
        close = peer.thought.partition("{}")[2].removesuffix("<|start|>assistant").strip()
        texts |= {
            "reasoning": thought + answer + end,
            "empty reasoning": peer.thought.format("") + answer + end,
            "reasoning and a call": thought + call,
            "reasoning, words and a call": thought + before + call,
            "reasoning and two calls": thought + peer.calls(ADD, NOTE) + called,
            "reasoning alone": thought.strip() + end,
            "a second end of reasoning": thought + peer.answer.format(f"It {close} is 3.") + end,
            "truncated reasoning": open + "One and",
            "an end in reasoning": open + "One and" + end,
            "a call in open reasoning": open + "One and " + call,
            "a call in reasoning": peer.thought.format("One " + peer.calls(ADD) + " two.") + answer + end,
        }
    return texts


def tokens_of(name, case):
    peer, tokenizer = PEERS[name], format_of(name).tokenizer
    letters = case == "a call in letters"  # one by one, so that no tag is a token
    parts = [peer.silent, *peer.calls(ADD)] if letters else [replies(name)[case]]
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]


TURNS = {
    "a user after an answer": ("an answer", [MORE]),
    "a user after reasoning": ("reasoning", [MORE]),
    "a tool after a call": ("a call", [ANSWER]),
    "a tool after reasoning and a call": ("reasoning and a call", [ANSWER]),
    "tools after two calls": ("two calls", [ANSWER, NOTED]),
    "a user after a truncated reply": ("a truncated reply", [MORE]),
}
"""Reply and later messages by case."""


class Difference(NamedTuple):
    """Row of `DIFFERENCES`.

    Attributes:
      parts: Parts of the result that differ, separated by spaces; all other parts are equal.
    """

    parts: str
    cases: tuple[str, ...]
    families: tuple[str, ...]
    reason: str


GEMMA, GLM, LLAMA = (tuple(name for name in PEERS if name.startswith(one)) for one in ("gemma", "glm", "llama"))
TAGS = tuple(name for name in PEERS if PEERS[name].call in (xml, minimax))
"""Families with arguments in tags, except GLM."""

OFF = ("qwen3 without thinking", "qwen3.5 without thinking")
OPENED = tuple(name for name in PEERS if PEERS[name].silent and PEERS[name].turns)
R1, OSS, KIMI = ("deepseek r1",), ("gpt-oss",), ("kimi k2",)
CALLED = (
    *("tools and a call", "tools and a call of text", "tools and a call without content"),
    "tools and a call after words",
)
ANSWERED = ("a tool after a call", "a tool after reasoning and a call", "tools after two calls")


def others(*families):
    return tuple(name for name in PEERS if name not in families)


DIFFERENCES = [
    # Prompts and turns
    Difference(
        "tokens",
        ("several turns", "tools, a call and more"),
        OFF,
        "renderers writes the empty thinking of earlier turns again; the template does not",
    ),
    Difference(
        "tokens",
        (*CALLED, "tools and two calls", "tools and a call, closed"),
        OFF[:1],
        "renderers writes the empty thinking of earlier turns again; the template does not",
    ),
    Difference(
        "tokens",
        ("tools and a call without content",),
        GLM,
        "the template and renderers write None; we take no content for an empty text",
    ),
    Difference(
        "tokens",
        (*CALLED, "tools, reasoning and a call", *ANSWERED),
        R1,
        "renderers opens reasoning after a tool's answer; the template does not",
    ),
    Difference(
        "tokens",
        ("tools and two calls",),
        R1,
        "renderers opens reasoning after a tool's answer, and leaves out the template's line break between calls",
    ),
    Difference(
        "tokens",
        ("control tokens",),
        tuple(name for name in PEERS if PEERS[name].prompts),
        "we keep control tokens that a message spells as text",
    ),
    Difference(
        "tokens",
        ("a user after a truncated reply",),
        (*OPENED, GLM[1]),
        "renderers first ends the reasoning, and ends turns of GLM with <|endoftext|>; we insert the template's tokens",
    ),
    # Calls that cannot be made
    Difference("content", ("a truncated call",), tuple(PEERS), "we leave malformed calls in the content"),
    Difference(
        "content",
        ("a broken call", "a broken call and a call"),
        others(*TAGS, *LLAMA),
        "we leave malformed calls in the content",
    ),
    Difference(
        "content calls",
        ("a broken call", "a broken call and a call"),
        TAGS,
        "renderers makes the call without the parameter that has no end",
    ),
    Difference(
        "content calls",
        ("an unknown tool",),
        others(*GEMMA, *GLM),
        "we make only calls of known tools; renderers does so for Gemma and GLM alone",
    ),
    Difference("content", ("an unknown tool",), (*GEMMA, *GLM), "we leave malformed calls in the content"),
    Difference(
        "content calls",
        ("an argument of another type",),
        others(*TAGS, *GLM),
        "we check arguments against the schema; renderers leaves that to the tool",
    ),
    Difference("content", ("an argument of another type",), (*TAGS, *GLM), "we leave malformed calls in the content"),
    Difference("content calls", ("a call without an argument",), tuple(PEERS), "we check arguments against the schema"),
    # Calls
    Difference("content calls", ("two calls",), LLAMA, "renderers reads one call; we read several, separated by ;"),
    Difference("content calls", ("a call and words",), LLAMA, "renderers reads a call only if no words follow"),
    Difference(
        "content",
        ("a call and words",),
        others(*LLAMA, *GEMMA, *GLM, *OSS),
        "renderers drops words after a call, except in Gemma, GLM and gpt-oss",
    ),
    Difference(
        "calls",
        ("a text of lines",),
        (*(name for name in TAGS if name != "minimax m2"), *GLM),
        "renderers strips values; the template writes them as they are",
    ),
    # Reasoning
    Difference(
        "reasoning calls",
        ("a call in open reasoning",),
        tuple(name for name in PEERS if PEERS[name].thought and name not in R1),
        "a call ends open reasoning in renderers, as in vLLM; for us only a closing tag, or a channel of gpt-oss, does",
    ),
    Difference("reasoning", ("a call in reasoning",), (*GEMMA, *KIMI), "we drop special tokens from the text"),
    Difference(
        "content reasoning calls",
        ("a call in reasoning",),
        GLM[:1],
        "renderers makes calls that GLM drafts in its reasoning",
    ),
    Difference("content", ("a second end of reasoning",), GLM[:1], "renderers drops the tag; we keep it as text"),
    Difference("content", ("a second end of reasoning",), GEMMA, "we drop special tokens from the text"),
    Difference(
        "content reasoning",
        ("an answer alone", "a truncated reply"),
        GLM[:1],
        "renderers takes an answer without tags for reasoning; the template opens no reasoning",
    ),
    Difference(
        "content reasoning",
        ("reasoning where the prompt closed it",),
        OFF,
        "we take tags for words once the prompt has closed the reasoning",
    ),
    Difference(
        "content",
        ("an answer alone", "a truncated reply", "a call in letters", "a second end of reasoning"),
        OSS,
        "we keep text outside of messages",
    ),
    Difference("content reasoning", ("a call in reasoning",), OSS, "a channel begins a message, even in another one"),
]
"""Differences that are decisions, or faults of `renderers`. A row that is no longer true fails."""


def check(name, case, ours, theirs):
    """Compare results by part; the parts in `DIFFERENCES` have to differ."""
    rows = [row for row in DIFFERENCES if name in row.families and case in row.cases]
    assert len(rows) < 2
    expected = rows[0].parts.split() if rows else []
    differing = [part for part in ours if ours[part] != theirs[part]]
    assert differing == expected, (rows, ours, theirs)


# The comparisons

SHOWN = [(name, case) for name in PEERS if PEERS[name].prompts for case in PROMPTS]
SPOKEN = [(name, case) for name in PEERS for case in replies(name)]
CONTINUED = [
    (name, case) for name in PEERS if PEERS[name].turns for case, (reply, _) in TURNS.items() if reply in replies(name)
]


@pytest.mark.parametrize(("name", "case"), SHOWN)
def test_prompts(name, case):
    chat, messages = format_of(name), PROMPTS[case]
    tools, opened = TOOLS if case.startswith("tools") else [], not case.endswith("closed")
    try:
        given, spelled = chat.template.as_text(chat.template_messages(messages))
        ours = list(chat.template.encode(chat.template.render(given, tools, open_reply=opened), marked=spelled))
        assert not opened or ours == list(chat.prompt(messages, tools))
    except EnvironmentFailure:
        ours = "refused"
    try:
        theirs = renderer_of(name).render_ids(messages, tools=tools or None, add_generation_prompt=opened)
    except ValueError:
        theirs = "refused"
    check(name, case, {"tokens": ours}, {"tokens": theirs})


@pytest.mark.parametrize(("name", "case"), SPOKEN)
def test_replies(name, case):
    chat, header = format_of(name), PEERS[name].header
    prompt, ids = list(chat.prompt([SYSTEM, ASKED], TOOLS)), tokens_of(name, case)
    reply = chat.parse(ids, TOOLS, opening=chat.opening(prompt))
    calls = [(call.name, dict(call.arguments)) for call in reply.calls]
    ours = {"content": reply.content, "reasoning": reply.reasoning, "calls": calls}
    start_tokens = chat.tokenizer.encode(header, add_special_tokens=False)
    parsed = renderer_of(name).parse_response([*start_tokens, *ids], tools=TOOLS, prompt_ids=None if header else prompt)
    calls = [(call.name, call.arguments) for call in parsed.tool_calls if call.status == "ok"]
    content, reasoning = parsed.content.strip(), (parsed.reasoning_content or "").strip()
    check(name, case, ours, {"content": content, "reasoning": reasoning, "calls": calls})


@pytest.mark.parametrize(("name", "case"), CONTINUED)
def test_turns(name, case):
    chat, (reply, messages) = format_of(name), TURNS[case]
    conversation = Conversation(chat, [SYSTEM, ASKED], TOOLS, cut_turns="close")
    prompt, ids = list(conversation.prompt), tokens_of(name, reply)
    conversation.sampled(ids, [-1.0] * len(ids))
    conversation.observe(messages)
    # With this setting renderers continues the sampled tokens after a user's message too, as we do.
    continued = renderer_of(name, thinking_retention="all").bridge_to_next_turn(prompt, ids, messages, tools=TOOLS)
    check(name, case, {"tokens": list(conversation.prompt)}, {"tokens": continued and continued.token_ids})


def test_every_difference_is_compared():
    compared = {*SHOWN, *SPOKEN, *CONTINUED}
    listed = [(name, case) for row in DIFFERENCES for name in row.families for case in row.cases]
    assert set(listed) <= compared and len(listed) == len(set(listed))
