"""Log-probabilities of prompts and of likely tokens, JSON of a schema, and other restricted answers."""

import json

import jsonschema
import numpy as np
import openai
import pytest

from tests.serving.test_openai import TOOL, calling, chat, script

pytestmark = pytest.mark.usefixtures("programs")


def complete(client, prompt, **options):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "temperature": 0, "seed": 1234, **options})


@pytest.fixture(scope="module")
def prompts(model):
    return [list(model.tokens_of(text)) for text in ("Tom has 12 apples and 3 pears.", "Tom", "日本 has")]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echoed_logprobs_score_prompts(client, model, prompts, max_tokens):
    """`local-completions` requests log-likelihoods in this way, with up to a few tokens more."""
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
        sampled = zip(numbers.token_logprobs[len(prompt) :], numbers.top_logprobs[len(prompt) :], strict=True)
        assert all(logp == max(top.values()) for logp, top in sampled), "greedy answers are the likeliest tokens"
        assert choice.text.startswith(model.token_bytes.text(prompt))
    assert answer.usage.completion_tokens == max_tokens * len(prompts)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * len(prompts)


def test_echo_of_a_text_and_scores_of_a_full_context(client, model):
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


def test_top_logprobs_equal_the_engines_scores(client, model):
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


def test_logprobs_name_control_tokens_and_bytes(model):
    from jaxrlhf.serving.answers import TextLogprobs

    eos = model.tokenizer.eos_token_id
    ids = [*model.tokenizer.encode("日", add_special_tokens=False), eos]
    made = TextLogprobs(model.token_bytes, ()).add(ids, [None, -1.0, -1.0, -2.0], [[(token, -0.5)] for token in ids])
    assert made["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", model.tokenizer.eos_token]
    assert made["top_logprobs"][1] == {"bytes:\\x97": -0.5}
    assert made["text_offset"] == [0, 0, 0, 1]


def test_parallel_tool_calls_false_returns_the_first_call(client, model, monkeypatch):
    written = model.tokenizer.encode(calling(model) + calling(model).replace("2", "3"), add_special_tokens=False)
    script(model, monkeypatch, (*written, model.tokenizer.eos_token_id))
    several = chat(client, tools=[TOOL]).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["a"] for call in several] == [2, 3]
    [call] = chat(client, tools=[TOOL], parallel_tool_calls=False).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 2}
    parts = chat(client, tools=[TOOL], parallel_tool_calls=False, stream=True)
    streamed = [call for event in parts for call in event.choices[0].delta.tool_calls or ()]
    assert [json.loads(call.function.arguments)["a"] for call in streamed] == [2]


def test_ignore_eos_samples_to_the_token_limit(client):
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
def test_answer_obeys_its_json_schema(client, stream):
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
def test_unsupported_schema_is_refused(client, schema):
    pytest.importorskip("llguidance", reason="grammars of JSON schemas need the package llguidance")
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def test_missing_llguidance_is_named(client, model, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    model.__dict__.pop("grammars", None)
    with pytest.raises(openai.BadRequestError, match="llguidance"):
        chat(client, response_format={"type": "json_object"})


def test_tokenizer_endpoints(model):
    """The harness reads a tokenizer from these endpoints of vLLM."""
    from scripted_models import Api

    api = Api(model.tokenizer)
    info = api.request("GET", "/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == (model.tokenizer.eos_token, model.tokenizer.chat_template)
    assert api.request("POST", "/tokenize", {"prompt": "Tom has"}).json()["tokens"] == list(model.tokens_of("Tom has"))
    ids = api.request("POST", "/tokenize", {"prompt": "Tom has", "add_special_tokens": False}).json()["tokens"]
    assert ids == model.tokenizer.encode("Tom has", add_special_tokens=False)
    assert api.request("POST", "/detokenize", {"tokens": [*ids, 2]}).json() == {
        "prompt": "Tom has" + model.tokenizer.decode([2])
    }
    for wrong in ({}, {"tokens": "ab"}, {"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": [True]}, []):
        assert api.request("POST", "/detokenize", wrong).status_code == 400


def test_failed_grammar_allows_only_the_stop_token(model):
    """llguidance keeps its error, for example after a schema that exceeds its limits."""
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
