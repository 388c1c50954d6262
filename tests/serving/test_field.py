"""Answers and refusals of a server whose engine returns scripted tokens: streams, bytes, messages, fields."""

from types import SimpleNamespace

import pytest
from chat_families import chatml, small_tokenizer, tokenizer_of
from scripted_models import Api
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from jaxrlhf.config import Sampling
from jaxrlhf.data.tokenizer import TokenBytes, decoder, embedded_tokenizer, pieces_of
from jaxrlhf.engine import Request
from jaxrlhf.engine.sequence import SequenceState, WindowTokens
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.texts import TextStream


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


F = [tool("f")]
CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
GONE = CALL.replace('"f"', '"g"')
USER = {"role": "user", "content": "Hi"}


# Streams

REPLIES = [
    ("qwen3", F, f"\n\nHi\n\n{CALL}", "Hi", ""),
    ("qwen3", [], "<think>plan</think>\n\nHTML has no </think> tag.", "HTML has no </think> tag.", "plan"),
    ("qwen3", F, f"<think>plan</think>\n\nLet me see. {GONE}", f"Let me see. {GONE}", "plan"),
    ("qwen2.5", [], "Thinking</think>\n\nHello there.", "Thinking</think>\n\nHello there.", ""),
    (
        "gpt-oss",
        [],
        "<|channel|>analysis<|message|>Thinking.<|end|><|start|>assistant<|channel|>final<|message|>Hello there."
        "<|return|>",
        "Hello there.",
        "Thinking.",
    ),
    ("gemma 4", [], "<|channel>thought\nThinking<channel|>Hello there.<turn|>", "Hello there.", "Thinking"),
    ("qwen3", [], "Hello there.", "Hello there.", ""),
    ("llama 3.1", F, '{"name": "Alice"}', '{"name": "Alice"}', ""),
]


@pytest.mark.parametrize("group", [1, 2, 8, 1000])
@pytest.mark.parametrize(("name", "tools", "text", "content", "reasoning"), REPLIES)
def test_stream_equals_complete_answer(name, tools, text, content, reasoning, group):
    api = Api(tokenizer_of(name), text, group=group)
    options = {"tools": tools} if tools else {}
    message = api.choice(**options)["message"]
    assert ((message["content"] or ""), message.get("reasoning_content", "")) == (content, reasoning)
    assert api.streamed(**options) == {"content": content, "reasoning_content": reasoning}


@pytest.mark.parametrize("length", range(24))
def test_analysis_of_any_length_is_followed_by_the_answer(length):
    text = "<|channel|>analysis<|message|>" + "a " * length
    api = Api(
        tokenizer_of("gpt-oss"), text + "<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>", group=8
    )
    assert api.streamed() == {"content": "So.", "reasoning_content": ("a " * length).strip()}


def test_stream_parses_the_complete_reply_once(monkeypatch):
    api = Api(tokenizer_of("qwen3"), "<think>a b c</think>\n\n" + "one two " * 200)
    parsed = []
    parse = api.model.form.parse
    monkeypatch.setattr(api.model.form, "parse", lambda *args, **named: parsed.append(1) or parse(*args, **named))
    assert len(api.events()) > 200 and len(parsed) == 1


@pytest.mark.parametrize(
    ("text", "stop", "content", "reasoning"),
    [
        ("<think>plan STOP", "STOP", "", "plan "),
        ("<think>plan</think>\n\nSo STOP", "STOP", "So ", "plan"),
        ("<think>plan</think>\n\nSo", None, "So", "plan"),
    ],
)
def test_stop_text_is_never_sent(text, stop, content, reasoning):
    api = Api(tokenizer_of("qwen3"), text, stop_text=stop)
    message = api.choice(stop=["STOP"])["message"]
    assert (message["content"], message["reasoning_content"]) == (content, reasoning)
    assert api.streamed(stop=["STOP"]) == {"content": content, "reasoning_content": reasoning}


def test_truncated_header_is_no_content():
    for text in ("<|channel|>commentary to=func", "<|channel|>ana", "<|channel|>final"):
        api = Api(tokenizer_of("gpt-oss"), text, truncated=True)
        choice = api.choice()
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
        assert api.streamed() == {"content": "", "reasoning_content": ""}


# Bytes


def with_byte_tokens():
    """Tokenizer like Llama 2's: words with their spaces, and a token for each byte of other text."""
    words = ("▁", "▁Hello", "▁world", "▁again", "!", "▁hello", "a", "▁x")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    return tokenizer, vocabulary


def byte_ids(vocabulary, text, *, cut=0):
    raw = text.encode()
    return [vocabulary[f"<0x{byte:02X}>"] for byte in raw[: len(raw) - cut]]


@pytest.mark.parametrize("group", [1, 2, 3, 9, 100])
@pytest.mark.parametrize(
    ("text", "cut", "expected"),
    [
        ("日本語日本語日本語", 0, "日本語日本語日本語"),
        ("é😀日é日", 0, "é😀日é日"),
        ("é😀日", 1, "é😀\ufffd"),
        ("abc", 0, "abc"),
    ],
)
def test_byte_tokens_are_streamed_as_text(text, cut, expected, group):
    tokenizer, vocabulary = with_byte_tokens()
    tokens = byte_ids(vocabulary, text, cut=cut)
    stream = TextStream(TokenBytes(tokenizer), (), (vocabulary["▁Hello"],))
    parts = [stream.add(tokens[at : at + group]) for at in range(0, len(tokens), group)]
    assert "".join(parts) + stream.end(None) == expected
    api = Api(tokenizer, tokens, group=group)
    assert api.completion()["text"] == expected
    assert "".join(choice["text"] for choice in api.events("/v1/completions")) == expected


@pytest.mark.parametrize("text", ["日本語日本語日本語", "é😀日é日", "hello 日本語日本語", "hello world"])
def test_pieces_join_to_the_text(text):
    tokenizer, _ = with_byte_tokens()
    for one in (tokenizer, embedded_tokenizer(), tokenizer_of("qwen3")):
        pieces = pieces_of(one.encode(text, add_special_tokens=False), decoder(one))
        assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


def test_pieces_of_a_cut_character_are_one_replacement():
    tokenizer, vocabulary = with_byte_tokens()
    for text, cut in (("é😀日", 1), ("é😀日", 2), ("日本語日本語", 2)):
        tokens = byte_ids(vocabulary, text)[:-cut]
        assert "".join(pieces_of(tokens, decoder(tokenizer))) == f"{text[:-1]}\ufffd"


@pytest.mark.parametrize("text", ["日本", "é", "😀", "plain words"])
def test_bytes_of_logprobs_join_to_the_text(text):
    for tokenizer in (embedded_tokenizer(), tokenizer_of("qwen3")):
        api = Api(tokenizer, text)
        entries = api.choice(logprobs=True)["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
        parts = [choice["logprobs"]["content"] for choice in api.events(logprobs=True) if choice.get("logprobs")]
        assert [entry for part in parts for entry in part] == entries
        assert len(entries) == len(tokenizer.encode(text, add_special_tokens=False))


def test_text_offsets_of_logprobs():
    tokenizer, vocabulary = with_byte_tokens()
    api = Api(tokenizer, [vocabulary[word] for word in ("▁world", "▁again", "!")], group=2)
    choice = api.completion(logprobs=0)
    assert choice["text"] == " world again!"
    assert choice["logprobs"]["tokens"] == [" world", " again", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 6, 12]
    parts = [one["logprobs"] for one in api.events("/v1/completions", logprobs=0) if one["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 6, 12]
    api = Api(tokenizer, [*byte_ids(vocabulary, "日本"), vocabulary["▁x"]])
    assert api.completion(logprobs=0)["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 1, 2]


# Messages


@pytest.mark.parametrize("name", ["qwen3.5", "gemma 3", "gpt-oss", "qwen2.5"])
def test_system_and_developer_messages_are_merged(name):
    api = Api(tokenizer_of(name), "So.")
    two = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, USER]
    assert api.chat(two).status_code == 200
    pair = api.prompt()
    assert api.chat([{"role": "system", "content": "Be brief.\n\nBe kind."}, USER]).status_code == 200
    assert pair == api.prompt() and "Be brief.\n\nBe kind." in pair


def test_system_message_that_the_template_omits_is_refused():
    chat = [
        {"role": "system", "content": "S1"},
        USER,
        {"role": "assistant", "content": "So."},
        {"role": "system", "content": "S2"},
        USER,
    ]
    answer = Api(tokenizer_of("gpt-oss"), "So.").chat(chat)
    assert answer.status_code == 400 and "'S2'" in answer.json()["error"]["message"]
    assert Api(tokenizer_of("qwen2.5"), "So.").chat(chat).status_code == 200


def asked(call_id="abcdefghi", name="f"):
    call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": '{"a": 1}'}}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "3"},
    ]


def test_tool_calls_are_rendered_in_the_policys_form_if_the_template_omits_them():
    api = Api(tokenizer_of("gemma 3"), "So.")
    assert api.chat([*asked(), USER]).status_code == 200
    model = "<start_of_turn>model\n```tool_code\nf(a=1)\n```<end_of_turn>\n"
    assert model + "<start_of_turn>user\n3\n\nHi<end_of_turn>\n<start_of_turn>model\n" in api.prompt()
    api = Api(tokenizer_of("phi 3.5"), "So.")
    assert api.chat(asked()).status_code == 200
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|assistant|>\n{call}<|end|>\n<|user|>\n3<|end|>\n<|assistant|>\n" in api.prompt()
    assert Api(tokenizer_of("qwen2.5"), "So.").chat(asked()).status_code == 200
    api = Api(chatml(), "So.")
    assert api.chat(asked()).status_code == 200
    turns = f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert api.prompt().endswith(turns)


@pytest.mark.parametrize("name", ["user", "s", "im_start", "ans"])
def test_a_tool_is_not_shown_because_other_text_spells_its_name(name):
    """Roles, control tokens and words of the template and of messages are no description of a tool."""
    for tokenizer in (tokenizer_of("phi 3.5"), chatml()):
        answer = Api(tokenizer, "So.").chat([{"role": "user", "content": "Has this an answer?"}], tools=[tool(name)])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert Api(tokenizer_of("qwen3"), "So.").chat(tools=[tool(name)]).status_code == 200


@pytest.mark.parametrize("name", ["phi 3.5", "gemma 3", "deepseek v3", "chatml"])
def test_tools_absent_from_the_prompt_are_refused(name):
    api = Api(chatml() if name == "chatml" else tokenizer_of(name), "So.")
    answer = api.chat(tools=[tool("get_weather")])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    told = [{"role": "user", "content": "You may call get_weather(). Hi"}]
    assert api.chat(told, tools=[tool("get_weather")]).status_code == 200
    assert Api(tokenizer_of("qwen3"), "So.").chat(tools=[tool("get_weather")]).status_code == 200


def test_tools_that_the_template_refuses_are_refused_with_its_reason():
    answer = Api(tokenizer_of("gpt-oss"), "So.").chat(tools=F)
    assert answer.status_code == 400 and "'description'" in answer.json()["error"]["message"]


KIMI = (
    "{%- for m in messages %}{{ '<|im_' + m.role + '|>' }}"
    "{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{%- endif %}{{ m.content }}"
    "{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{%- for call in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) }}"
    "{{ '<|tool_call_end|>' }}{%- endfor %}{{ '<|tool_calls_section_end|>' }}{%- endif %}{{ '<|im_end|>' }}"
    "{%- endfor %}{%- if tools %}{{ tools | tojson }}{%- endif %}"
    "{%- if add_generation_prompt %}{{ '<|im_assistant|>' }}{%- endif %}"
)
KIMI_TOKENS = (
    *("<|begin|>", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|im_system|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)


def test_sampled_call_id_is_kept():
    tokenizer = small_tokenizer(KIMI_TOKENS, (), KIMI)
    said = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    api = Api(tokenizer, said)
    message = api.choice(tools=F)["message"]
    [call] = message["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("functions.f:0", "f")
    told = [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    assert api.chat(told, tools=F).status_code == 200
    assert f"<|im_assistant|>{said}<|im_end|><|im_tool|>## Return of functions.f:0\n3" in api.prompt()


def test_missing_call_ids_are_generated():
    message = Api(tokenizer_of("qwen3"), CALL + CALL).choice(tools=F)["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)


# Fields

NEUTRAL = [
    *({name: value} for name, value in (("presence_penalty", 0), ("frequency_penalty", 0.0), ("logit_bias", {}))),
    *({name: value} for name, value in (("repetition_penalty", 1.0), ("ignore_eos", False), ("ignore_eos", True))),
    *({name: value} for name, value in (("stop_token_ids", []), ("skip_special_tokens", True), ("best_of", None))),
    *({name: value} for name, value in (("chat_template_kwargs", {}), ("reasoning_effort", None))),
    {"parallel_tool_calls": True, "tools": F},
    {"parallel_tool_calls": False},
    {"parallel_tool_calls": False, "tools": F},
    {"prediction": {"type": "content", "content": "So?"}},
    {"response_format": {"type": "text"}, "top_logprobs": 0},
    {"tools": F, "tool_choice": "auto"},
    {"add_generation_prompt": True, "continue_final_message": False, "include_stop_str_in_output": False},
    {"echo": False, "detokenize": True, "guided_json": None, "allowed_token_ids": None, "separate_reasoning": True},
]
REFUSED = [
    ("ignore_eos", {"ignore_eos": 1}),
    ("echo", {"echo": True}),
    ("response_format", {"response_format": {"type": "grammar"}}),
    ("guided_regex", {"guided_regex": "a"}),
    ("separate_reasoning", {"separate_reasoning": False}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("chat_template_kwargs", {"chat_template_kwargs": 3}),
    ("colours", {"chat_template_kwargs": {"colours": 3}}),
    ("messages", {"chat_template_kwargs": {"messages": []}}),
    ("enable", {"chat_template_kwargs": {"enable": False}}),
    ("reasoning_effort", {"reasoning_effort": "low"}),
    ("tool_choice", {"tools": F, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("tool_choice", {"tools": F, "tool_choice": "required"}),
    ("parallel_tool_calls", {"tools": F, "parallel_tool_calls": "no"}),
    ("stop_token_ids", {"stop_token_ids": [3]}),
    ("colour", {"colour": None}),
]


@pytest.mark.parametrize("options", NEUTRAL, ids=lambda options: "-".join(options))
def test_neutral_values_are_accepted(options):
    assert Api(tokenizer_of("qwen3"), "So.").choice(**options)["message"]["content"] == "So."


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=[name for name, _ in REFUSED])
def test_unsupported_values_are_refused_by_field_name(name, options):
    answer = Api(tokenizer_of("qwen3"), "So.").chat(**options)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert name in answer.json()["error"]["message"]


def test_variables_of_the_chat_template_are_set():
    api = Api(tokenizer_of("qwen3"), "<think> literally")
    choice = api.choice(chat_template_kwargs={"enable_thinking": False})
    assert api.prompt().endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert choice["message"]["content"] == "<think> literally" and "reasoning_content" not in choice["message"]
    said = api.streamed(chat_template_kwargs={"enable_thinking": False})
    assert said == {"content": "<think> literally", "reasoning_content": ""}
    assert api.choice(chat_template_kwargs={"enable_thinking": True})["message"]["reasoning_content"] == "literally"
    assert api.prompt().endswith("<|im_start|>assistant\n")
    api = Api(tokenizer_of("gpt-oss"), "So.")
    api.choice(reasoning_effort="high")
    assert "Reasoning: high" in api.prompt()
    api.choice()
    assert "Reasoning: medium" in api.prompt()


def test_response_format_is_refused_if_the_prompt_opens_reasoning(monkeypatch):
    monkeypatch.setattr(ServedModel, "grammars", SimpleNamespace(constraint=lambda schema, stops: None))
    api = Api(tokenizer_of("qwen3.5"), "{}")
    json_wanted = {"response_format": {"type": "json_object"}}
    error = api.chat(**json_wanted).json()["error"]
    assert error["param"] == "response_format" and "chat_template_kwargs" in error["message"]
    choice = api.choice(chat_template_kwargs={"enable_thinking": False}, **json_wanted)
    assert choice["message"]["content"] == "{}"
    assert Api(tokenizer_of("qwen3"), "{}").choice(**json_wanted)["message"]["content"] == "{}"


def test_model_is_found_by_its_name():
    api = Api(tokenizer_of("qwen3"))
    [card] = api.request("GET", "/v1/models").json()["data"]
    found = api.request("GET", "/v1/models/org/tiny")
    assert (found.status_code, found.json()) == (200, card) and card["id"] == "org/tiny"
    missing = api.request("GET", "/v1/models/gpt-5")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("count", [3, 9, 30])
def test_stop_text_of_byte_tokens_is_found_at_any_window_start(count):
    tokenizer, vocabulary = with_byte_tokens()
    sampled = byte_ids(vocabulary, "😀" * count + "日本" + "語")
    state = SequenceState(Request(0, (1,)), Sampling(), 0, 1000, (2,), stop_texts=("日本",))
    for token in sampled:
        if state.stop_text is None:
            state.extend(WindowTokens(0, [token], [-1.0], True, None, None), TokenBytes(tokenizer).text)
    assert (state.stop_text, state.tokens) == ("日本", sampled[: 4 * count + 6])
