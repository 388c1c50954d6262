"""Log-probabilities of prompts and of likely tokens, as evaluators ask for them, and answers that are narrowed."""

import json

import jsonschema
import numpy as np
import openai
import pytest
from served_models import TOKEN, served

from tests.serving.test_openai import TOOL, calling, chat, script

pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture(scope="module")
def serving():
    with served() as pair:
        yield pair


@pytest.fixture(scope="module")
def model(serving):
    return serving[1]


@pytest.fixture(scope="module")
def client(serving):
    with openai.OpenAI(base_url=serving[0].address + "/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


def complete(client, prompt, **options):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "temperature": 0, "seed": 1234, **options})


@pytest.fixture(scope="module")
def prompts(model):
    return [list(model.tokens_of(text)) for text in ("Tom has 12 apples and 3 pears.", "Tom", "日本 has")]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_prompts_are_scored_as_the_harness_reads_them(client, model, prompts, max_tokens):
    """The request of `local-completions` for a log-likelihood, one token more or less at the end."""
    answer = complete(client, prompts, max_tokens=max_tokens, logprobs=1, echo=True)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        numbers = choice.logprobs
        assert [len(each) for each in (numbers.tokens, numbers.top_logprobs, numbers.text_offset)] == [
            len(numbers.token_logprobs)
        ] * 3
        assert len(prompt) <= len(numbers.token_logprobs) - max_tokens <= len(prompt)
        assert numbers.token_logprobs[0] is None and numbers.top_logprobs[0] is None
        alone = model.service.score(prompt).result(60)
        own = numbers.token_logprobs[1 : len(prompt)]
        np.testing.assert_allclose(own, alone.logp_T[1:], atol=1e-5)
        greedy = [logp == max(top.values()) for logp, top in zip(own, numbers.top_logprobs[1:], strict=False)]
        assert greedy == alone.is_greedy_T[1:].tolist()
        drawn = zip(numbers.token_logprobs[len(prompt) :], numbers.top_logprobs[len(prompt) :], strict=True)
        assert all(logp == max(top.values()) for logp, top in drawn), "greedy answers are the likeliest tokens"
        assert choice.text.startswith(model.token_bytes.text(prompt))
    assert answer.usage.completion_tokens == max_tokens * len(prompts)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * len(prompts)


def test_a_text_is_echoed_and_a_whole_context_is_scored(client, model):
    answer = complete(client, "Tom has 12", max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].logprobs) == ("Tom has 12", None)
    most = model.service.engine.context_tokens
    whole = complete(client, [7] * most, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
    assert len(whole.token_logprobs) == most
    assert set(map(len, whole.top_logprobs[1:])) == {1}, "the token itself"
    with pytest.raises(openai.BadRequestError, match="context"):
        complete(client, [7] * most, max_tokens=1, echo=True)
    with pytest.raises(openai.BadRequestError, match="stream"):
        complete(client, "Tom", max_tokens=1, echo=True, stream=True)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        complete(client, [[2**20]], max_tokens=0, echo=True, logprobs=1)
    assert complete(client, "Tom", max_tokens=0).choices[0].text == ""


def test_likely_tokens_of_a_chat_and_of_a_completion_are_the_models(client, model):
    whole = chat(
        client, logprobs=True, top_logprobs=5, max_tokens=6, temperature=0.8, extra_body={"return_token_ids": True}
    )
    [choice] = whole.choices
    prompt = choice.prompt_token_ids
    scores = model.service.score((*prompt, *choice.token_ids), temperature=0.8).result(60)
    sampled = chat(client, logprobs=True, max_tokens=6, temperature=0.8).choices[0].logprobs.content
    for place, (entry, before) in enumerate(zip(choice.logprobs.content, sampled, strict=True), start=len(prompt)):
        assert entry.token == before.token and entry.logprob == pytest.approx(before.logprob, abs=1e-4)
        assert [other.logprob for other in entry.top_logprobs] == scores.likely_logp_TK[place, :5].tolist()
        assert len({(other.token, *other.bytes) for other in entry.top_logprobs}) == 5
    numbers = complete(client, "Tom has", max_tokens=4, logprobs=3).choices[0].logprobs
    assert [max(top.values()) for top in numbers.top_logprobs] == numbers.token_logprobs
    assert all(len(top) == 3 for top in numbers.top_logprobs)


def test_control_tokens_and_bytes_have_names_of_their_own(model):
    from jaxrlhf.serving.answers import TextLogprobs

    eos = model.tokenizer.eos_token_id
    ids = [*model.tokenizer.encode("日", add_special_tokens=False), eos]
    made = TextLogprobs(model.token_bytes, ()).add(ids, [None, -1.0, -1.0, -2.0], [[(token, -0.5)] for token in ids])
    assert made["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", model.tokenizer.eos_token]
    assert made["top_logprobs"][1] == {"bytes:\\x97": -0.5}
    assert made["text_offset"] == [0, 0, 0, 1]


def test_one_call_at_a_time_is_the_first(client, model, monkeypatch):
    written = model.tokenizer.encode(calling(model) + calling(model).replace("2", "3"), add_special_tokens=False)
    script(model, monkeypatch, (*written, model.tokenizer.eos_token_id))
    several = chat(client, tools=[TOOL]).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["a"] for call in several] == [2, 3]
    [call] = chat(client, tools=[TOOL], parallel_tool_calls=False).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 2}
    parts = chat(client, tools=[TOOL], parallel_tool_calls=False, stream=True)
    streamed = [call for event in parts for call in event.choices[0].delta.tool_calls or ()]
    assert [json.loads(call.function.arguments)["a"] for call in streamed] == [2]


def test_an_answer_goes_on_after_its_end_if_asked(client):
    stopped = [chat(client, seed=seed, max_tokens=100).usage.completion_tokens for seed in range(8)]
    ran = [
        chat(client, seed=seed, max_tokens=100, extra_body={"ignore_eos": True}).usage.completion_tokens
        for seed in range(8)
    ]
    assert min(stopped) < 100 and set(ran) == {100}


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["pear", "apple"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_json_of_its_schema(client, stream):
    pytest.importorskip("llguidance", reason="grammars of JSON schemas need the package llguidance")
    response_format = {"type": "json_schema", "json_schema": {"name": "fruit", "strict": True, "schema": SCHEMA}}
    options = {"max_tokens": 128, "temperature": 0.7, "response_format": response_format}
    texts = []
    for seed in range(3):
        answer = chat(client, seed=seed, stream=stream, **options)
        parts = [event.choices[0] for event in answer] if stream else [answer.choices[0]]
        texts.append("".join((part.delta if stream else part.message).content or "" for part in parts))
        assert parts[-1].finish_reason == "stop"
        jsonschema.validate(json.loads(texts[-1]), SCHEMA)
    assert len(set(texts)) > 1
    free = chat(client, seed=1, max_tokens=24).choices[0].message.content
    assert not free.startswith("{")
    both = complete(client, "Tom has", max_tokens=128, extra_body={"response_format": response_format})
    jsonschema.validate(json.loads(both.choices[0].text), SCHEMA)
    some = json.loads(
        complete(client, "A", max_tokens=3, extra_body={"response_format": {"type": "json_object"}}).choices[0].text[:1]
        + "}"
    )
    assert some == {}


@pytest.mark.parametrize("schema", [{"type": "pear"}, {"$ref": "#/nowhere"}, {"allOf": 3}])
def test_a_schema_that_cannot_be_followed_is_refused(client, schema):
    pytest.importorskip("llguidance", reason="grammars of JSON schemas need the package llguidance")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def test_a_server_without_grammars_says_what_to_install(client, model, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    model.__dict__.pop("grammars", None)
    with pytest.raises(openai.BadRequestError, match="llguidance"):
        chat(client, response_format={"type": "json_object"})


def test_a_tokenizer_is_asked_over_http(model):
    """The endpoints of vLLM that the harness takes a tokenizer from."""
    from scripted_models import Api

    api = Api(model.tokenizer)
    info = api.request("GET", "/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == (model.tokenizer.eos_token, model.tokenizer.chat_template)
    ids = api.request("POST", "/tokenize", {"prompt": "Tom has", "add_special_tokens": False}).json()["tokens"]
    assert ids == model.tokenizer.encode("Tom has", add_special_tokens=False)
    assert api.request("POST", "/detokenize", {"tokens": [*ids, 2]}).json() == {
        "prompt": "Tom has" + model.tokenizer.decode([2])
    }
    for wrong in ({}, {"tokens": "ab"}, {"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": [True]}, []):
        assert api.request("POST", "/detokenize", wrong).status_code == 400


def test_a_grammar_that_gives_up_ends_its_response_and_no_other(model):
    """llguidance stays in its error, as after a schema that exceeds its limits."""
    pytest.importorskip("llguidance", reason="grammars of JSON schemas need the package llguidance")
    from jaxrlhf.serving.grammars import JsonGrammars

    stop = model.tokenizer.eos_token_id
    constraint = JsonGrammars(model.tokenizer).constraint(SCHEMA, [stop])
    bits_U = constraint.allowed()
    allowed = [token for token in range(32 * len(bits_U)) if bits_U[token // 32] >> (token % 32) & 1]
    assert allowed and stop not in allowed
    constraint.take(next(token for token in range(len(model.tokenizer)) if token not in {*allowed, stop}))
    bits_U = constraint.allowed()
    assert [token for token in range(32 * len(bits_U)) if bits_U[token // 32] >> (token % 32) & 1] == [stop]
