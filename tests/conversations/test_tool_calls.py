"""Replies with tool calls in each family's form: parsed correctly, and without exceptions."""

import json
import random
import time
from functools import cache

import pytest
from chat_families import small_tokenizer
from written_calls import FORMS, NOTE, NOW, arguments

from jaxrlhf.config import Refusal
from jaxrlhf.conversations.reply_parser import ReplyParser
from jaxrlhf.conversations.tool_calls import Signatures, deepseek, gemma, glm, kimi, minimax, qwen_xml
from jaxrlhf.conversations.tool_calls.written import WrittenCall
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.episode import MalformedCall, Reply, ToolCall

TOOLS = [NOTE, NOW]
GOOD, BAD, ANY = 40, 8, 30
"""Number of sampled replies of each form, each fault and random tokens: more than 100 for a family."""


@cache
def parser_of(form):
    template = "{{ messages }}" + "{# " + form.sign + " #}"
    tokenizer = small_tokenizer(("<s>", "</s>", *form.special), form.tags, template)
    return tokenizer, ReplyParser(tokenizer, template)


def read(parser, tokens, tools=TOOLS, opening=""):
    return parser.reply(tuple(tokens), tools, ended=False, opening=opening)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_well_formed_calls_are_parsed(name):
    form, draw = FORMS[name], random.Random(name)
    tokenizer, parser = parser_of(form)
    assert parser.family == form.family
    for _ in range(GOOD):
        calls = [
            ("note", arguments(draw)) if draw.random() < 0.8 else ("get_time", {})
            for _ in range(1 if form.one else draw.randint(1, 3))
        ]
        before = draw.choice(["", "Let me see."]) if form.content else ""
        text = f"{before}\n{form.write(calls)}" if before else form.write(calls)
        reply = read(parser, tokenizer.encode(text, add_special_tokens=False))
        assert reply.malformed == (), text
        named = [f"functions.{name}:0" if form.family == "kimi" else "" for name, _ in calls]
        assert reply.calls == tuple(ToolCall(*call, own) for call, own in zip(calls, named, strict=True)), text
        assert [list(map(type, call.arguments.values())) for call in reply.calls] == [
            list(map(type, given.values())) for _, given in calls
        ]
        assert reply.content == before


FAULTS = {
    "a tool that is not there": (lambda given: ("forget", given), "unknown_tool", "the tools are note, get_time"),
    "a text for a number": (lambda given: ("note", {**given, "count": "many"}), "arguments", "count"),
    "an argument that is not there": (lambda given: ("note", {**given, "colour": "red"}), "arguments", "colour"),
    "no required one": (lambda given: ("note", {"count": 1}), "arguments", "text"),
}


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_call_that_does_not_fit_is_malformed(name, fault):
    form, draw = FORMS[name], random.Random(name + fault)
    tokenizer, parser = parser_of(form)
    change, kind, word = FAULTS[fault]
    for _ in range(BAD):
        reply = read(parser, tokenizer.encode(form.write([change(arguments(draw))]), add_special_tokens=False))
        [wrong] = reply.malformed
        assert (wrong.kind, reply.calls) == (kind, ()) and word in wrong.detail


@pytest.mark.parametrize("name", sorted(name for name, form in FORMS.items() if form.end))
def test_a_call_that_does_not_end_has_no_structure(name):
    form, draw = FORMS[name], random.Random(name)
    tokenizer, parser = parser_of(form)
    for _ in range(BAD):
        text = form.write([("note", arguments(draw))])
        assert text.endswith(form.end)
        reply = read(parser, tokenizer.encode(text.removesuffix(form.end), add_special_tokens=False))
        assert reply.calls == () and [one.kind for one in reply.malformed] == ["structure"], text


@pytest.mark.parametrize("name", sorted(name for name, form in FORMS.items() if form.tags or len(form.special) > 1))
def test_letters_that_spell_a_tag_are_no_call(name):
    form = FORMS[name]
    if name in ("gemma 3", "llama 3", "llama 4"):  # forms without tags, in letters alone
        return
    tokenizer, parser = parser_of(form)
    text = form.write([("note", {"text": "a"})])
    ids = [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)]
    reply = read(parser, ids)
    assert (reply.calls, reply.malformed, reply.text) == ((), (), text)


CIRCLES = [
    (glm, "<tool_call>note" + "<arg_key>a</arg_key><arg_value>" * 2000 + "</tool_call>"),
    (qwen_xml, "<tool_call><function=note>" + "<parameter=a>\n" * 20_000 + "</function></tool_call>"),
    (minimax, "<minimax:tool_call>" + '<invoke name="note">' * 20_000 + "</minimax:tool_call>"),
    (
        minimax,
        '<minimax:tool_call><invoke name="note">' + '<parameter name="a">' * 20_000 + "</invoke></minimax:tool_call>",
    ),
    (deepseek, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json" + "\n" * 2000 + "<｜tool▁call▁end｜>"),
    (kimi, f"<|tool_call_begin|>functions.{' ' * 40_000}x<|tool_call_argument_begin|>no<|tool_call_end|>"),
    (gemma, f"<|tool_call>call:{' ' * 40_000}<tool_call|>"),
]


@pytest.mark.parametrize(("family", "text"), CIRCLES, ids=[family.__name__.rpartition(".")[2] for family, _ in CIRCLES])
def test_endless_repetition_is_parsed_in_linear_time(family, text):
    start = time.perf_counter()
    written = family.find(text, str, ["note"])
    assert time.perf_counter() - start < 1.0
    assert [type(call) for call in written.calls] == [str]


@pytest.mark.parametrize("name", sorted(FORMS))
def test_any_tokens_are_parsed(name):
    form, draw = FORMS[name], random.Random(name)
    tokenizer, parser = parser_of(form)
    own = list(tokenizer.added_tokens_decoder)
    good = tokenizer.encode(form.write([("note", arguments(draw))]), add_special_tokens=False)
    for trial in range(ANY):
        if trial % 2:
            tokens = [draw.choice(own) if draw.random() < 0.3 else draw.randrange(len(tokenizer)) for _ in range(40)]
        else:
            tokens = list(good)
            for _ in range(draw.randint(1, 6)):
                place = draw.randrange(len(tokens))
                tokens[place : place + draw.randint(0, 3)] = [draw.randrange(len(tokenizer))]
        reply = read(parser, tokens, opening=draw.choice(["", "<think>\n"]))
        assert isinstance(reply, Reply) and reply.tokens == tuple(tokens)
        assert all(isinstance(call, ToolCall) and call.name in ("note", "get_time") for call in reply.calls)
        assert all(isinstance(one, MalformedCall) and one.detail for one in reply.malformed)


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("depth", [300, 3000])
def test_deeply_nested_values_are_parsed(name, depth):
    form = FORMS[name]
    tokenizer, parser = parser_of(form)
    text = form.write([("note", {"text": "a", "extra": {"k": 123456789}})])
    for deep in ("[" * depth + "]" * depth, '{"k":' * depth + "1" + "}" * depth, "9" * 5000, "1e999", "NaN"):
        reply = read(parser, tokenizer.encode(text.replace("123456789", deep), add_special_tokens=False))
        assert len(reply.calls) + len(reply.malformed) >= 1


def test_an_unknown_escape_stays_unchanged():
    tokenizer, parser = parser_of(FORMS["lfm2"])
    text = r"<|tool_call_start|>[note(text='C:\d')]<|tool_call_end|>"
    [call] = read(parser, tokenizer.encode(text, add_special_tokens=False)).calls
    assert call.arguments == {"text": r"C:\d"}


@pytest.mark.parametrize("name", ["deepseek v3", "deepseek v3.1"])
def test_a_string_in_a_call_of_deepseek_may_contain_a_block(name):
    tokenizer, parser = parser_of(FORMS[name])
    text = FORMS[name].write([("note", {"text": "```sh\nls\n```"})])
    [call] = read(parser, tokenizer.encode(text, add_special_tokens=False)).calls
    assert call.arguments == {"text": "```sh\nls\n```"}


def test_errors_of_calls_have_no_marks():
    tokenizer, parser = parser_of(FORMS["qwen xml"])
    text = "<tool_call><function=note><s></function></tool_call>"
    [wrong] = read(parser, tokenizer.encode(text, add_special_tokens=False)).malformed
    assert wrong.detail.endswith("got '<s>'")


@pytest.mark.parametrize("name", sorted(FORMS))
def test_calls_in_reasoning_are_ignored(name):
    form = FORMS[name]
    tokenizer, parser = parser_of(form)
    call = form.write([("note", {"text": "a"})])
    for opening, text in (("", f"<think>{call}</think>\n\nNo."), ("...<think>\n", f"{call}</think>No.")):
        reply = read(parser, tokenizer.encode(text, add_special_tokens=False), opening=opening)
        assert (reply.calls, reply.malformed, reply.content) == ((), (), "No.")
    reply = read(parser, tokenizer.encode(f"Well. {call}", add_special_tokens=False), opening="<think>\n")
    assert (reply.calls, reply.content) == ((), "") and reply.reasoning.startswith("Well.")


# The embedded tokenizer's form

TWO = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"type": kind}, "b": {"type": kind}}},
        },
    }
    for name, kind in (("add", "integer"), ("join", "string"))
]


@pytest.mark.parametrize(
    ("text", "tools", "calls", "malformed"),
    [
        ("<<1, 2>>", TWO[:1], [("add", {"a": 1, "b": 2})], []),
        (
            "so <<add: 1,2>> and <<join: x, y, z>>.",
            TWO,
            [("add", {"a": 1, "b": 2}), ("join", {"a": "x", "b": "y, z"})],
            [],
        ),
        ("<<1>>", TWO[:1], [("add", {"a": 1})], []),
        ("<<add: 1, x>>", TWO, [], ["arguments"]),
        ("<<1, 2>>", TWO, [], ["unknown_tool"]),
        ("<<mul: 1, 2>>", TWO, [], ["unknown_tool"]),
        ("<<1, 2", TWO, [], ["structure"]),
        ("1 > 2 < 3", TWO, [], []),
        ("<<>>", [NOW], [("get_time", {})], []),
        ("<<>>", [], [], []),  # without tools nothing is a call
    ],
)
def test_calls_of_the_embedded_tokenizer(text, tools, calls, malformed):
    tokenizer = embedded_tokenizer()
    reply = read(ReplyParser(tokenizer, tokenizer.chat_template), tokenizer.encode(text), tools)
    assert [(call.name, call.arguments) for call in reply.calls] == calls
    assert [one.kind for one in reply.malformed] == malformed


def test_positional_arguments_follow_the_order_of_properties():
    tokenizer = embedded_tokenizer()
    parser, tokens = ReplyParser(tokenizer, tokenizer.chat_template), tokenizer.encode("<<1, 2>>")
    turned = json.loads(json.dumps(TWO[:1]))
    properties = turned[0]["function"]["parameters"]["properties"]
    properties["a"] = properties.pop("a")
    assert [read(parser, tokens, tools).calls[0].arguments for tools in (TWO[:1], turned)] == [
        {"a": 1, "b": 2},
        {"b": 1, "a": 2},
    ]


# Arguments and schemas


def tool_with(**schema):
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("schema", "given", "typed", "meant"),
    [
        ({"type": "integer"}, "5", True, 5),
        ({"type": "integer"}, 5.0, True, 5),
        ({"type": "integer"}, "5.0", False, 5),
        ({"type": "number"}, "2.5", True, 2.5),
        ({"type": "number"}, "5", False, 5),
        ({"type": ["number", "integer"]}, "5.0", False, 5),  # in every order of a set
        ({"type": "boolean"}, "True", False, True),
        ({"type": "string"}, "5", False, "5"),
        ({"type": ["string", "integer"]}, "5", True, "5"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", True, [1, 2]),
        ({"type": "object"}, '{"a": 1}', False, {"a": 1}),
        ({"type": "string", "nullable": True}, None, True, None),
        ({"type": "integer", "nullable": True}, "null", False, None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", True, 7),
        ({"enum": ["1", "2"]}, "1", False, "1"),
        ({}, "5", False, 5),
        ({}, "so", False, "so"),
        ({}, "5", True, "5"),
    ],
)
def test_a_value_with_one_reading_is_converted(schema, given, typed, meant):
    call = Signatures(tool_with(**schema)).check(WrittenCall("f", {"x": given}, typed))
    assert call == ToolCall("f", {"x": meant}) and type(call.arguments["x"]) is type(meant)


@pytest.mark.parametrize(
    ("schema", "given"),
    [
        ({"type": "integer"}, "5.5"),
        ({"type": "integer"}, True),
        ({"type": "integer"}, "true"),
        ({"type": "boolean"}, "1"),
        ({"type": "number"}, "NaN"),
        ({"type": "string"}, 5),
        ({"type": "array"}, "{}"),
        ({"enum": ["a"]}, "b"),
        ({"type": "integer", "minimum": 3}, "2"),
    ],
)
def test_a_value_that_does_not_fit_is_malformed(schema, given):
    call = Signatures(tool_with(**schema)).check(WrittenCall("f", {"x": given}))
    assert isinstance(call, MalformedCall) and call.kind == "arguments"


def test_a_property_may_be_called_nullable():
    tools = tool_with(type="boolean")
    tools[0]["function"]["parameters"]["properties"]["nullable"] = {"type": "boolean", "nullable": True}
    given = {"x": True, "nullable": None}
    assert Signatures(tools).check(WrittenCall("f", given)) == ToolCall("f", given)


@pytest.mark.parametrize("value", ["1j", "b'a'", "{1, 2}", "...", "1e999", "{1: 2}", "{(1,): 2}", "[[1j]]"])
@pytest.mark.parametrize("schema", [{}, {"type": "number", "minimum": 0}], ids=["any", "number"])
def test_a_value_outside_of_json_is_malformed(schema, value):
    tokenizer, parser = parser_of(FORMS["lfm2"])
    text = f"<|tool_call_start|>[f(x={value})]<|tool_call_end|>"
    [wrong] = read(parser, tokenizer.encode(text, add_special_tokens=False), tool_with(**schema)).malformed
    assert wrong.kind == "arguments" and "must be JSON values" in wrong.detail


def test_a_tuple_is_a_list():
    tokenizer, parser = parser_of(FORMS["lfm2"])
    tokens = tokenizer.encode("<|tool_call_start|>[f(x=(1, (2,)))]<|tool_call_end|>", add_special_tokens=False)
    assert [call.arguments for call in read(parser, tokens, tool_with(type="array")).calls] == [{"x": [1, [2]]}]


@pytest.mark.parametrize("given", [None, 5, [1], "x", '"x"'])
def test_arguments_that_are_no_object(given):
    call = Signatures(tool_with(type="string")).check(WrittenCall("f", given))
    assert isinstance(call, MalformedCall) and call.kind == "arguments"


def test_arguments_in_json_text_are_parsed():
    assert Signatures(tool_with(type="integer")).check(WrittenCall("f", '{"x": 1}')) == ToolCall("f", {"x": 1})


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (tool_with(type="integer") * 2, "two tools have the name 'f'"),
        (tool_with(type="word"), "no JSON schema"),
        (tool_with(**{"$ref": "https://example.org/x.json"}), "refer to another document"),
        (tool_with(**{"$ref": "#/$defs/absent"}), "refer to '#/\\$defs/absent', which does not exist"),
        ([{"type": "function", "function": {"name": "f", "parameters": 5}}], "no JSON schema of an object: 5"),
        ([{"type": "function", "function": {}}], "has no name"),
    ],
)
def test_wrong_tool_schemas_are_refused(tools, words):
    with pytest.raises(Refusal, match=words):
        Signatures(tools)
