"""Streamed replies equal whole replies: for every family, grouping of tokens and sampled reply."""

import random
import time
from functools import cache

import pytest
from chat_families import FAMILIES, small_tokenizer, tokenizer_of
from written_calls import FORMS, NOTE, NOW, arguments

from jaxrlhf.conversations import ChatFormat
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.serving.texts import ReplyStream, before_stop

TOOLS = [NOTE, NOW]
REPLIES, MORE_REPLIES = 30, 200
"""Random replies of each family in the fast tier, and in the slow one."""

OPENINGS = ("", "<think>\n", "<think>\n\n</think>\n\n", "<|channel>thought\n", "<|channel>thought\n<channel|>")
STOPS = ("STOP", "ab", "</x>")
PIECES = (
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought\n", "<channel|>", "<|channel>", "thought"),
    *("<|channel|>analysis<|message|>", "<|channel|>final", "<|message|>", "<|end|>", "<|start|>assistant", "to=f"),
    *("<|channel|>commentary to=functions.note <|constrain|>json<|message|>", '{"text": "a"}', "<|call|>"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "note", "```tool_code\n", "```", "<<", ">>", "[note("),
    *('{"name": "note"', '{"a": 1}', "[1]", "{", "[", "<", "`", "\n", "\n\n", " ", "  ", "STOP", "a", "b", "</", "x>"),
    *("Hello there.", "plan", "é😀日", "日本語", "<|python_tag|>", "<|im_end|>", "<tool_call|>", "\ue000"),
)


@cache
def formats():
    found = {name: ChatFormat(tokenizer_of(name), family.settings) for name, family in FAMILIES.items()}
    template = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    for name, form in FORMS.items():
        tokenizer = small_tokenizer(("<s>", "</s>", *form.special), form.tags, template + "{# " + form.sign + " #}")
        found[f"form {name}"] = ChatFormat(tokenizer)
    return {**found, "embedded": ChatFormat(embedded_tokenizer())}


NAMES = [*FAMILIES, *(f"form {name}" for name in FORMS), "embedded"]


def groups(tokens, draw, most):
    """Split tokens into groups of random lengths."""
    at = 0
    while at < len(tokens):
        size = draw.randint(1, most)
        yield tokens[at : at + size]
        at += size


def streamed(form, tokens, tools, opening, stops, stop, parts):
    """Return all reasoning and content of a stream."""
    stream = ReplyStream(form, tools, opening, stops)
    said = {"reasoning": "", "content": ""}
    made = [stream.add(part) for part in parts]
    made.append(stream.end(form.parse(tokens, tools, opening=opening), stop))
    for event in made:
        for name, text in event.items():
            said[name] += text
    return said


def reply_of(name, form, draw):
    """Sample a reply: pieces of all families' forms, calls of the family, and random tokens."""
    family = name.removeprefix("form ")
    own = [FORMS[family].write([("note", arguments(draw))])] if family in FORMS else []
    own += [FAMILIES[family].call] if family in FAMILIES else []
    choices = [own if own and draw.random() < 0.15 else PIECES for _ in range(draw.randint(1, 9))]
    texts = [draw.choice(some) for some in choices]
    tokens = form.tokenizer.encode("".join(texts), add_special_tokens=False)
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        place = draw.randrange(len(tokens) + 1)
        tokens[place:place] = [draw.randrange(len(form.tokenizer))]
    if draw.random() < 0.3:
        tokens.append(draw.choice(sorted(form.stop_tokens)))
    return tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_equals_the_whole_reply(name):
    check_replies(name, REPLIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_equals_the_whole_reply_at_length(name):
    check_replies(name, MORE_REPLIES)


def check_replies(name, count):
    """Compare streams of random replies with the parsed whole replies."""
    form, draw = formats()[name], random.Random(name)
    known = 0
    for _ in range(count):
        tokens = reply_of(name, form, draw)
        tools, opening = draw.choice([TOOLS, []]), draw.choice(OPENINGS)
        stops = draw.choice([(), STOPS])
        whole = form.parse(tokens, tools, opening=opening)
        found = [stop for stop in stops if stop in whole.text]
        stop = draw.choice(found) if found and draw.random() < 0.5 else None
        if stop is not None:
            stops = (stop,)
        expected = {"reasoning": before_stop(whole.reasoning, stop), "content": before_stop(whole.content, stop)}
        for most in (1, 3, 12):
            parts = [*groups(tokens, draw, most)]
            assert streamed(form, tokens, tools, opening, stops, stop, parts) == expected, (tokens, opening, parts)
        stream = ReplyStream(form, tools, opening, ())
        known += sum(len(text) for part in tokens for text in stream.add([part]).values())
    assert known > 5 * count  # what nobody would wait for is said before the end


def test_a_call_without_text_holds_back_later_text():
    form = formats()["gpt-oss"]
    text = "<|channel|>commentary to=functions.note<|message|><|end|><|start|>assistant<|channel|>final<|message|>So."
    tokens = form.tokenizer.encode(text, add_special_tokens=False)
    whole = form.parse(tokens, TOOLS)
    assert whole.content == "to=functions.note So." and len(whole.malformed) == 1
    said = streamed(form, tokens, TOOLS, "", (), None, [[token] for token in tokens])
    assert said == {"reasoning": "", "content": whole.content}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["\n", "<", " a\n"], ids=["lines", "tags", "words"])
def test_the_time_of_an_event_depends_on_its_tokens(name, text):
    form = formats()[name]
    stream = ReplyStream(form, TOOLS, "", STOPS)
    tokens = form.tokenizer.encode(text, add_special_tokens=False)
    start = time.thread_time()
    for _ in range(4_000):
        stream.add(tokens)
    assert time.thread_time() - start < 1.0


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {key: {"type": "integer"} for key in "ab"}},
    },
}


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm 4.5", "deepseek v3", "gemma 4"])
def test_a_call_in_reasoning_that_has_no_end_is_not_made(name):
    """The call is part of the reasoning, so the reply has neither calls nor content."""
    form, call = formats()[name], FAMILIES[name].call
    begin, end = ("<|channel>thought\n", "<channel|>") if name == "gemma 4" else ("<think>\n", "\n</think>\n\n")
    for opening, text in (("", begin + "I add. " + call), (begin, "I add. " + call), (begin, call)):
        tokens = form.tokenizer.encode(text, add_special_tokens=False)
        reply = form.parse(tokens, [ADD], opening=opening)
        assert (reply.content, reply.calls, reply.malformed, reply.reasoned) == ("", (), (), True)
        assert "add" in reply.reasoning
        said = streamed(form, tokens, [ADD], opening, (), None, [[token] for token in tokens])
        assert said == {"reasoning": reply.reasoning, "content": ""}
        tokens = form.tokenizer.encode(text + end + call, add_special_tokens=False)
        reply = form.parse(tokens, [ADD], opening=opening)
        assert (reply.content, [(one.name, one.arguments) for one in reply.calls]) == ("", [("add", {"a": 1, "b": 2})])
