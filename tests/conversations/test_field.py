"""Replies that were parsed wrongly in use, and similar ones: reasoning, content and calls written by hand."""

from functools import cache

import pytest
from chat_families import FAMILIES, small_tokenizer, tokenizer_of
from written_calls import FORMS

from jaxrlhf.conversations import ChatFormat
from jaxrlhf.conversations.reply_parser import ReplyParser


def tool(name, /, **kinds):
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


F = [tool("f")]
ECHO = [tool("echo", text="string", other="string")]


@cache
def format_of(name):
    return ChatFormat(tokenizer_of(name), FAMILIES[name].settings)


def read(name, text, tools=(), opening=""):
    form = format_of(name)
    return form.parse(form.tokenizer.encode(text, add_special_tokens=False), tools, opening=opening)


def of_form(name, text, tools):
    form = FORMS[name]
    template = "{{ messages }}{# " + form.sign + " #}"
    tokenizer = small_tokenizer(("<s>", "</s>", *form.special), form.tags, template)
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    return ReplyParser(tokenizer, template).reply(tokens, tools, ended=False, opening="")


def words(reply):
    return reply.reasoning, reply.content, [(call.name, dict(call.arguments)) for call in reply.calls]


CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", ["glm 4.5", "qwen3", "deepseek v3", "phi 3.5"])
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "opened"])
def test_the_first_end_ends_reasoning(name, sampled):
    opening, begin = ("", "<think>") if sampled else ("...<think>\n", "")
    for text, reasoning, content in (
        ("plan</think>\n\nHTML has no </think> tag.", "plan", "HTML has no </think> tag."),
        ("a <think> b</think>c</think>d</think>", "a <think> b", "c</think>d</think>"),
        ("</think>\n\nSo.", "", "So."),
        ("plan</think>", "plan", ""),
        ("plan", "plan", ""),
        ("plan</think>\n\nSo.", "plan", "So."),
    ):
        reply = read(name, begin + text, opening=opening)
        assert (reply.reasoning, reply.content, reply.reasoned) == (reasoning, content, True)


@pytest.mark.parametrize(
    ("name", "opening", "text"),
    [
        ("qwen3 without thinking", CLOSED, "Text <think> literally"),
        ("qwen3 without thinking", CLOSED, "<think>a</think> is markup"),
        ("qwen2.5", "", "Use <think> and </think> around the plan, then answer."),
        ("llama 3.1", "", "Use <think> and </think> around the plan, then answer."),
        ("phi 3.5", "", "Thinking</think>\n\nHello there."),
        ("qwen2.5", "", "Thinking</think>\n\nHello there."),
        ("qwen3", "", "Thinking</think>\n\nHello there."),
        ("qwen3", "", "Hello there."),
        ("gemma 3", "", "1 < 2"),
    ],
)
def test_tags_that_open_no_reasoning_are_content(name, opening, text):
    reply = read(name, text, opening=opening)
    assert (reply.reasoning, reply.content, reply.reasoned) == ("", text, False)


def test_reasoning_that_a_template_opens_in_other_turns_ends_without_a_beginning():
    for text, reasoning, content in (("Hm.</think>\n\nIt is 3.", "Hm.", "It is 3."), ("It is 3.", "", "It is 3.")):
        reply = read("deepseek v3", text, opening="<｜tool▁outputs▁end｜>")
        assert (reply.reasoning, reply.content) == (reasoning, content)


AGE = [tool("get_age", name="string")]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (AGE, '{"name": "Alice", "age": 3}'),
        (AGE, '{"name": "Alice"}'),
        (AGE, '{"title": "x", "parameters": 1}'),
        (AGE, '{"model":"m","parameters":{"lr":0.1}}'),
        (AGE, '{"answer": {"parameters": {"a": 1}}}'),
        (F, '{"name": "f"} is how you write it'),
        (F, '{"name": "f", "size": 3}'),
        (F, '{"name": "g", "parameters": {}, "why": "an example"}'),
        (F, '{"name": "f", '),
        (F, "{1, 2} is a set"),
        (F, "[]"),
        ((), '{"name": "f", "parameters": {}}'),
    ],
)
def test_json_that_calls_no_tool_is_an_answer(tools, text):
    reply = read("llama 3.1", text, tools)
    assert (*words(reply), reply.malformed) == ("", text, [], ())


@pytest.mark.parametrize(
    ("text", "content", "calls", "malformed"),
    [
        ('{"name": "f", "parameters": {}}', "", [("f", {})], []),
        ('{"name": "f"}', "", [("f", {})], []),
        ('{"name": "f", "parameters": null}', "", [("f", {})], []),
        (' {"type": "function", "name": "f", "arguments": {}}; {"name": "f"}', "", [("f", {}), ("f", {})], []),
        ('{"name": "f", "parameters": {}}\n\nLet me see.', "Let me see.", [("f", {})], []),
        ('{"name": "g", "parameters": {}}', '{"name": "g", "parameters": {}}', [], ["unknown_tool"]),
        ('{"name": "f", "parameters": {', '{"name": "f", "parameters": {', [], ["structure"]),
        ('<|python_tag|>{"name": "f"', '{"name": "f"', [], ["structure"]),
    ],
)
def test_json_that_calls_a_tool_is_a_call(text, content, calls, malformed):
    reply = read("llama 3.1", text, F)
    assert words(reply) == ("", content, calls) and [one.kind for one in reply.malformed] == malformed


@pytest.mark.parametrize("name", ["lfm2", "llama 4"])
@pytest.mark.parametrize("tools", [(), F], ids=["plain", "tools"])
def test_an_answer_in_brackets_is_an_answer(name, tools):
    text = "[see above (again)]"
    reply = of_form(name, text, tools)
    assert (*words(reply), reply.malformed) == ("", text, [], ())


def test_without_tools_a_call_is_content():
    text = "To call a tool the model writes <tool_call>JSON</tool_call>."
    reply = read("qwen3", text)
    assert (*words(reply), reply.malformed) == ("", text, [], ())
    assert words(read("qwen3", '<tool_call>{"name": "f"}</tool_call>', F)) == ("", "", [("f", {})])


# Tags in values


def hermes(value):
    return '<tool_call>\n{"name": "echo", "arguments": {"text": "' + value + '"}}\n</tool_call>'


def xml(value):
    return (
        f"<tool_call>\n<function=echo>\n<parameter=text>\n{value}\n</parameter>\n<parameter=other>\nb\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def glm(value):
    pairs = f"<arg_key>text</arg_key>\n<arg_value>{value}</arg_value>\n<arg_key>other</arg_key>\n"
    return f"<tool_call>echo\n{pairs}<arg_value>b</arg_value>\n</tool_call>"


def minimax(value):
    return (
        '<minimax:tool_call>\n<invoke name="echo">\n'
        f'<parameter name="text">{value}</parameter>\n<parameter name="other">b</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    )


def kimi(value):
    return (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.echo:0<|tool_call_argument_begin|>{"text": "'
        + value
        + '"}<|tool_call_end|><|tool_calls_section_end|>'
    )


TAGGED = [
    *(
        (hermes, name, value)
        for name in ("hermes", "hermes in letters")
        for value in (
            "ends with </tool_call>",
            "<tool_call>{}</tool_call>",
            "a <tool_call> b",
            "plain",
        )
    ),
    *(
        (xml, "qwen xml", value)
        for value in (
            "ends </tool_call>",
            "x <tool_call> y",
            "<parameter=x>1</parameter>",
            "a</parameter>b",
            "see <parameter=x> tag",
            "</function>",
            "plain",
        )
    ),
    *((glm, "glm", value) for value in ("ends </tool_call>", "a</arg_value>b", "x <tool_call> y", "plain")),
    *(
        (minimax, "minimax m2", value)
        for value in (
            "a</parameter>b",
            "see </minimax:tool_call> tag",
            "a</invoke>b",
            "plain",
        )
    ),
    *((kimi, "kimi k2", value) for value in ("ends <|tool_call_end|>", "plain")),
]


@pytest.mark.parametrize(("write", "name", "value"), TAGGED)
def test_a_value_may_spell_the_tags_of_its_form(write, name, value):
    reply = of_form(name, "Well. " + write(value) + "\nDone.", ECHO)
    [call] = reply.calls
    assert (call.arguments["text"], reply.malformed) == (value, ())
    assert call.arguments.get("other", "b") == "b"
    assert reply.content == "Well. \nDone."


def test_a_call_after_a_broken_call_is_parsed():
    for name, broken, good in (
        ("qwen xml", "<tool_call>no</tool_call>", xml("a")),
        ("qwen xml", "<tool_call>\n<function=echo>\n<parameter=text>\na\n</function>\n</tool_call>", xml("a")),
        ("qwen xml", "<tool_call>", xml("a")),
        ("hermes", '<tool_call>{"name": "echo</tool_call>', hermes("a")),
        ("hermes", "<tool_call>", hermes("a")),
        ("glm", "<tool_call>no <arg_key></tool_call>", glm("a")),
        ("glm", "<tool_call>echo\n<arg_key>text</arg_key>\n<arg_value>b\n</tool_call>", glm("a")),
        ("qwen xml", "<tool_call>\n<function=echo>\n<parameter=text>\nb\n</tool_call>", xml("a")),
        (
            "minimax m2",
            '<minimax:tool_call>\n<invoke name="echo">\n<parameter name="text">b\n</minimax:tool_call>',
            minimax("a"),
        ),
        ("minimax m2", "<minimax:tool_call>no</minimax:tool_call>", minimax("a")),
    ):
        reply = of_form(name, broken + " " + good, ECHO)
        assert [call.arguments["text"] for call in reply.calls] == ["a"] and len(reply.malformed) == 1
        assert reply.content == broken + " "


def test_text_between_parameters_is_an_error():
    text = xml("1").replace("</parameter>\n<parameter=other>", "</parameter> so <parameter=other>")
    reply = of_form("qwen xml", text, ECHO)
    assert [one.kind for one in reply.malformed] == ["structure"] and reply.content == text


# Calls in Python

WRITE = [tool("write", text="string"), tool("memory_get", **{"from": "integer", "class": "string"})]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[write(text="a\nb")]', [("write", {"text": "a\nb"})]),
        (
            '[write(text="it\'s\n\\"a\\" = b"), write(text=\'c\')]',
            [("write", {"text": 'it\'s\n"a" = b'}), ("write", {"text": "c"})],
        ),
        ('[memory_get(from=1, class="x")]', [("memory_get", {"from": 1, "class": "x"})]),
        ('[write(text="from=1, class=2\n")]', [("write", {"text": "from=1, class=2\n"})]),
        ('[write(text="a\\nb")]', [("write", {"text": "a\nb"})]),
        ("[write(text='''a\nb''')]", [("write", {"text": "a\nb"})]),
    ],
)
def test_calls_in_python_may_have_line_breaks_and_keywords(text, calls):
    reply = read("lfm2", f"<|tool_call_start|>{text}<|tool_call_end|>", WRITE)
    assert (*words(reply), reply.malformed) == ("", "", calls, ())


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        ('write(\n    text="a",\n)', [("write", {"text": "a"})]),
        ('write(text="""a\nb""")', [("write", {"text": "a\nb"})]),
        ('write(text="a\nb")', [("write", {"text": "a\nb"})]),
        ('write(text="a")\nmemory_get(from=1)', [("write", {"text": "a"}), ("memory_get", {"from": 1})]),
        ('[write(text="a"), write(text="b")]', [("write", {"text": "a"}), ("write", {"text": "b"})]),
    ],
)
def test_a_block_of_python_is_parsed_as_one_program(code, calls):
    reply = read("gemma 3", f"So.\n```tool_code\n{code}\n```", WRITE)
    assert (*words(reply), reply.malformed) == ("", "So.", calls, ())


def test_a_line_of_a_block_may_be_wrong():
    reply = read("gemma 3", '```tool_code\nwrite(text="a")\nwrite text\n```', WRITE)
    assert [call.arguments for call in reply.calls] == [{"text": "a"}]
    assert [one.kind for one in reply.malformed] == ["structure"] and "write text" in reply.content
    reply = read("gemma 3", "```tool_code\nx = 1\n```", WRITE)
    assert [one.kind for one in reply.malformed] == ["structure"]


# Text behind a call

GREP = [tool("grep", pattern="string"), tool("a", text="string")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '[TOOL_CALLS]grep[ARGS]{"pattern":"TODO"}\n\nLet me search.',
            "Let me search.",
            [("grep", {"pattern": "TODO"})],
        ),
        ('[TOOL_CALLS][{"name":"a","arguments":{}}] done', "done", [("a", {})]),
        (
            'Well. [TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]a[ARGS]{"text": "[TOOL_CALLS]"}',
            "Well. ",
            [("a", {}), ("a", {"text": "[TOOL_CALLS]"})],
        ),
        ('[TOOL_CALLS]grep[CALL_ID]abc[ARGS]{"pattern": "x"}', "", [("grep", {"pattern": "x"})]),
        ('[TOOL_CALLS][{"name":"a","arguments":{}}]', "", [("a", {})]),
    ],
)
def test_text_after_a_call_of_mistral_is_content(text, content, calls):
    reply = of_form("mistral with names", text, GREP)
    assert (*words(reply), reply.malformed) == ("", content, calls, ())


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('[TOOL_CALLS]grep[CALL_ID]a1b2c3d4e[ARGS]{"pattern": "x"}', ["a1b2c3d4e"]),
        ('[TOOL_CALLS][{"name":"a","arguments":{},"id":"VvvODy9mT"},{"name":"a","arguments":{}}]', ["VvvODy9mT", ""]),
        ('[TOOL_CALLS]grep[CALL_ID]short[ARGS]{"pattern": "x"}', [""]),
        ('[TOOL_CALLS][{"name":"a","arguments":{},"id":123456789}]', [""]),
    ],
)
def test_ids_that_mistral_samples_are_kept_where_its_template_takes_them(text, ids):
    reply = of_form("mistral with names", text, GREP)
    assert [call.call_id for call in reply.calls] == ids and reply.malformed == ()


# Calls that cannot be made

GONE = '<tool_call>{"name":"g","arguments":{}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("qwen3", f"<think>plan</think>\n\n{GONE}", GONE),
        ("qwen3", f"<think>plan</think>\n\nLet me see. {GONE}", f"Let me see. {GONE}"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>commentary to=functions.g "
            "<|constrain|>json<|message|>{}<|call|>",
            "to=functions.g {}",
        ),
        ("gemma 4", "<|channel>thought\nplan<channel|><|tool_call>call:g{}<tool_call|>", "call:g{}"),
    ],
)
def test_a_call_that_cannot_be_made_is_shown_without_the_reasoning(name, text, content):
    reply = read(name, text, F)
    assert (reply.reasoning, reply.content, reply.calls) == ("plan", content, ())
    assert [one.kind for one in reply.malformed] == ["unknown_tool"]
    assert reply.message == {"role": "assistant", "content": content, "reasoning_content": "plan"}


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>commentary to=func", "", ""),
        ("<|channel|>ana", "", ""),
        ("<|channel|>final", "", ""),
        (" to=functions.f<|channel|>comm", "", ""),
        ("<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|chan", "plan", ""),
        ("<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>final<|message|>So.", "plan", "So."),
        ("<|channel|>analysis<|message|>plan<|start|>assistant<|channel|>final<|message|>So.", "plan", "So."),
        ("So.", "", "So."),
        ("together", "", "together"),
    ],
)
@pytest.mark.parametrize("tools", [(), F], ids=["plain", "tools"])
def test_a_header_is_not_content(text, reasoning, content, tools):
    assert words(read("gpt-oss", text, tools)) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\nThinking<channel|>Hello there.", "Thinking", "Hello there."),
        ("<|channel>thought", "", ""),
        ("<|channel>thought\n", "", ""),
        ("Hello there.", "", "Hello there."),
    ],
)
def test_thinking_of_gemma(text, reasoning, content):
    assert words(read("gemma 4", text)) == (reasoning, content, [])
