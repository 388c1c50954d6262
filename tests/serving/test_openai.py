"""Requests of OpenAI's client to a server."""

import json
import time
from dataclasses import replace

import openai
import pytest
from served_models import CONTEXT, RESPONSE
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jaxrlhf.config import Sampling
from jaxrlhf.data.tokenizer import TokenBytes, embedded_tokenizer
from jaxrlhf.engine import Request
from jaxrlhf.serving.endpoints import chat_answer
from jaxrlhf.serving.texts import TextStream
from jaxrlhf.serving.wire import ChatRequest

MESSAGES = [{"role": "user", "content": "Tom has 12 apples."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
pytestmark = pytest.mark.usefixtures("programs")


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "seed": 3, **options}
    )


def sampled(model, copy=0, **options):
    """Completion of the engine itself."""
    prompt = model.form.prompt(MESSAGES)
    request = Request(copy, prompt, max_tokens=24, stop_tokens=tuple(model.form.stop_tokens))
    return model.service.submit(request, Sampling(**options), seed=3).result(60)


def test_chat_equals_the_engines_completion(client, model):
    answer = chat(client, extra_body={"return_token_ids": True}, logprobs=True)
    own = sampled(model)
    [choice] = answer.choices
    assert tuple(choice.token_ids) == own.tokens
    assert tuple(choice.prompt_token_ids) == model.form.prompt(MESSAGES)
    assert choice.message.content == model.form.parse(own.tokens).content
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(own.logps, abs=1e-5)
    assert choice.finish_reason == ("length" if own.truncated else "stop")
    counts = answer.usage
    assert (counts.prompt_tokens, counts.completion_tokens) == (len(model.form.prompt(MESSAGES)), len(own.tokens))
    assert [card.id for card in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
def test_streamed_chat_equals_complete_chat(client, tools):
    options = {"tools": tools} if tools else {}
    whole = chat(client, n=2, extra_body={"return_token_ids": True}, logprobs=True, **options)
    contents, ids, logps, ends = ["", ""], [[], []], [[], []], {}
    stream = chat(
        client,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        extra_body={"return_token_ids": True},
        **options,
    )
    events = list(stream)
    for choice in (choice for event in events for choice in event.choices):
        contents[choice.index] += choice.delta.content or ""
        ids[choice.index] += getattr(choice, "token_ids", None) or []
        logps[choice.index] += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
        ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert len(events) > 6
    assert events[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        assert contents[index] == (choice.message.content or "")
        assert ids[index] == choice.token_ids
        assert logps[index] == pytest.approx([entry.logprob for entry in choice.logprobs.content])
        assert ends[index] == choice.finish_reason
    assert whole.choices[0].token_ids != whole.choices[1].token_ids


def test_chat_stops_at_tokens_of_template_and_model(model):
    request = ChatRequest.read({"model": "tiny", "messages": MESSAGES})
    [choice] = chat_answer(replace(model, stop_tokens=(7,)), request, None).choices
    assert {*choice.stop_tokens} == {7, *model.form.stop_tokens}


def test_equal_seeds_give_equal_choices(client, model):
    first, second = (chat(client, n=3).choices for _ in range(2))
    assert [choice.message.content for choice in first] == [choice.message.content for choice in second]
    assert first[2].message.content == model.form.parse(sampled(model, 2).tokens).content
    assert len({chat(client, seed=None).choices[0].message.content for _ in range(3)}) > 1
    greedy = [chat(client, temperature=0, seed=seed).choices[0].message.content for seed in (1, 2)]
    assert greedy == [model.form.parse(sampled(model, greedy=True).tokens).content] * 2


def test_completion_accepts_text_or_ids_and_stops_at_a_text(client, model):
    ids = model.tokens_of("Tom has")
    common = {"model": "tiny", "seed": 5, "max_tokens": 24}
    by_text = client.completions.create(prompt="Tom has", **common)
    by_ids = client.completions.create(prompt=[list(ids), list(ids)], logprobs=0, **common)
    texts = [choice.text for choice in by_ids.choices]
    assert texts == [by_text.choices[0].text] * 2
    assert len(by_ids.choices[0].logprobs.token_logprobs) == by_ids.usage.completion_tokens // 2
    stop = texts[0][6:9]
    cut = client.completions.create(prompt="Tom has", stop=[stop, "never"], **common)
    assert cut.choices[0].text == texts[0][: texts[0].index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = [
        event.choices[0] for event in client.completions.create(prompt="Tom has", stop=stop, stream=True, **common)
    ]
    assert "".join(piece.text for piece in pieces) == cut.choices[0].text
    assert pieces[-1].finish_reason == "stop"


def test_tool_calls_are_returned(client, model, monkeypatch):
    written = model.tokenizer.encode("Let me add. " + calling(model), add_special_tokens=False)
    tokens = (*written, model.tokenizer.eos_token_id)
    script(model, monkeypatch, tokens)
    for tools in ([TOOL], []):
        whole = chat(client, tools=tools or openai.NOT_GIVEN).choices[0]
        parts = [event.choices[0] for event in chat(client, tools=tools or openai.NOT_GIVEN, stream=True)]
        calls = [call for part in parts for call in part.delta.tool_calls or ()]
        content = "".join(part.delta.content or "" for part in parts)
        assert content == (whole.message.content or "")
        assert parts[-1].finish_reason == whole.finish_reason == ("tool_calls" if tools else "stop")
        assert [call.function.name for call in calls] == [call.function.name for call in whole.message.tool_calls or ()]
        if tools:
            assert "Let me add." in content and "{" not in content
            assert json.loads(calls[0].function.arguments) == {"a": 2}
            assert calls[0].id == whole.message.tool_calls[0].id


def calling(model) -> str:
    """Call in the form of the embedded template."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "a", "function": {"name": "add", "arguments": {"a": 2}}}],
    }
    said = model.tokenizer.apply_chat_template([*MESSAGES, message], tools=[TOOL], tokenize=False)
    return said.rpartition("<|assistant|>")[2].removesuffix(model.tokenizer.eos_token)


def script(model, monkeypatch, tokens) -> None:
    """Have the engine sample these tokens, two at a time."""
    from concurrent.futures import Future

    from jaxrlhf.engine import Completion

    def submit(request, sampling, *, seed, on_tokens):
        future: Future = Future()
        for first in range(0, len(tokens), 2):
            on_tokens(tokens[first : first + 2], [-0.5] * len(tokens[first : first + 2]))
        future.set_result(Completion(request.request_id, tokens, (-0.5,) * len(tokens), False, 4))
        return future

    monkeypatch.setattr(model.service, "submit", submit)


REFUSED = [
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ({"top_logprobs": 2, "logprobs": True, "stream": True}, 400, "top_logprobs"),
    ({"tools": [TOOL, TOOL]}, 400, "tools"),
    ({"tools": [TOOL, TOOL], "stream": True}, 400, "tools"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, 400, "response_format"),
    ({"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}}, 400, "min_tokens"),
    ({"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}, 400, "ignore_eos"),
    ({"stop": ["a"] * 40}, 400, "stop"),
    ({"max_tokens": RESPONSE + 1}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "apples " * CONTEXT}]}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "judge", "content": "a"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, 400, "messages"),
    ({"model": "gpt-5"}, 404, "model"),
    ({"extra_body": {"suffix": "the end"}}, 400, "suffix"),
]


@pytest.mark.parametrize(
    ("options", "status", "param"), REFUSED, ids=[row[2] + str(n) for n, row in enumerate(REFUSED)]
)
def test_unsupported_requests_get_typed_errors(client, options, status, param):
    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, **options)
    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code


def test_completion_keeps_the_space_before_its_first_word():
    backend = Tokenizer(WordLevel({"[UNK]": 0, "▁Hello": 1, "▁world": 2}, unk_token="[UNK]"))
    backend.decoder = Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([2]) == "world"
    for prompt, text in (((1,), " world world"), ((), "world world")):
        stream = TextStream(TokenBytes(tokenizer), (), prompt)
        assert stream.add((2,)) + stream.add((2,)) + stream.end(None) == text


def test_served_chat_prints_todays_date(model):
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + tokenizer.chat_template
    years = [
        tokenizer.decode(replace(model, tokenizer=tokenizer, today=today).form.prompt(MESSAGES))[:4]
        for today in (True, False)
    ]
    assert years == [time.strftime("%Y"), "2024"]
