"""Images in chats of the endpoint: sampled like the engine itself, and refused by a typed error."""

import base64
import io
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import httpx2
import jax
import numpy as np
import openai
import PIL.Image
import pytest
import served_models

from jaxrlhf import chat as terminal
from jaxrlhf import models
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.config import load as load_configuration
from jaxrlhf.config.serving import ServingLimits, SessionLimits
from jaxrlhf.data.tokenizer import decoder
from jaxrlhf.engine import Engine, EngineService, Request
from jaxrlhf.models import model_config, tokenizer_of
from jaxrlhf.models.vision.reader import image_reader
from jaxrlhf.processes.http_server import HttpServer
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.server import Server

pytestmark = pytest.mark.usefixtures("programs")


def url(seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (28, 42, 3), np.uint8)
    written = io.BytesIO()
    PIL.Image.fromarray(pixels).save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def wide():
    written = io.BytesIO()
    PIL.Image.new("1", (8192, 5456)).save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


@contextmanager
def seeing_server():
    shipped = load_configuration("grpo_shapes")
    small = replace(shipped.model, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2)
    small = replace(small, vision=replace(small.vision, hidden_size=16, intermediate_size=16, num_layers=1))
    config = replace(shipped, model=replace(small, head_dim=8))
    tokenizer = tokenizer_of(config)
    shape = model_config(config.model, tokenizer)
    reader = image_reader(config, shape, tokenizer)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), models.param_shapes(shape, "lm")
    )
    sizes = {"slots": 4, "max_prompt_tokens": 96, "max_response_tokens": 8, "decode_tokens_per_dispatch": 4}
    stops = (tokenizer.eos_token_id,)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    decode = decoder(tokenizer)
    engine = Engine(shape, mesh, stop_tokens=stops, decode=decode, pixels=reader.patches, **sizes)
    engine.load(jax.device_put(params, jax.devices()[0]), version=1)
    with EngineService(engine) as service:
        model = ServedModel("sees", service, tokenizer, stops, ServingLimits(), reader)
        with (
            Server(model, token="a-key") as server,
            openai.OpenAI(base_url=f"{server.address}/v1", api_key="a-key", max_retries=0) as client,
        ):
            yield client, model


@pytest.fixture(scope="module")
def sees():
    with seeing_server() as both:
        yield both


def parts(*contents):
    kinds = {"data": "image_url", "http": "image_url"}
    made = []
    for content in contents:
        if kinds.get(content.split(":")[0]):
            made.append({"type": "image_url", "image_url": {"url": content}})
        else:
            made.append({"type": "text", "text": content})
    return [{"role": "user", "content": made}]


def chat(client, messages, model="sees"):
    options = {"seed": 3, "max_tokens": 8, "logprobs": True, "extra_body": {"return_token_ids": True}}
    return client.chat.completions.create(model=model, messages=messages, **options).choices[0]


def test_chat_with_images_equals_the_engines_completion(sees):
    client, model = sees
    choice = chat(client, parts("what is ", url(0), " and ", url(1), "?"))
    token = model.images.placeholders.token
    prompt = tuple(choice.prompt_token_ids)
    at = np.flatnonzero(np.array(prompt) == token)
    assert len(at) == 12 and "what is" in model.tokenizer.decode(prompt[: at[0]])
    told = {"messages": parts("what is ", url(0), " and ", url(1), "?")}
    address, headers = f"{client.base_url}".removesuffix("v1/"), {"Authorization": f"Bearer {client.api_key}"}
    assert httpx2.post(f"{address}tokenize", json=told, headers=headers).json()["tokens"] == [*prompt]
    found = [replace(model.images.refer(url(n), place="here"), start=int(at[6 * n])) for n in (0, 1)]
    stops = tuple(model.form.stop_tokens)
    request = Request(0, prompt, max_tokens=8, images=tuple(found), stop_tokens=stops)
    expected = model.service.submit(request, Sampling(), seed=3).result(timeout=120)
    assert tuple(choice.token_ids) == expected.tokens
    sampled = [each.logprob for each in choice.logprobs.content]
    np.testing.assert_allclose(sampled, expected.logps, atol=1e-5)
    other = chat(client, parts("what is ", url(1), " and ", url(0), "?"))
    assert other.prompt_token_ids == choice.prompt_token_ids
    assert abs(other.logprobs.content[0].logprob - sampled[0]) > 1e-4 or other.token_ids != choice.token_ids


def test_session_continues_only_with_equal_images(sees):
    """A chat with the same text and another image starts a sequence."""
    _, model = sees
    with Server(model, token="a-key") as server:
        base_url, key = server.sessions.open("pictures", 3, SessionLimits())
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as agent:
            asked = parts(url(0), "what?")
            first = chat(agent, asked)
            more = parts("and ", url(1), "?")
            said = {"role": "assistant", "content": first.message.content}
            second = chat(agent, [*asked, said, *more])
            other = chat(agent, [*parts(url(2), "what?"), said, *more])
        recorded = server.sessions.close("pictures")
    stream = [*first.prompt_token_ids, *first.token_ids]
    assert second.prompt_token_ids[: len(stream)] == stream
    assert [len(sequence.images) for sequence in recorded.sequences] == [2, 2]
    assert len({sequence.images[0].digest for sequence in recorded.sequences}) == 2
    token = model.images.placeholders.token
    for sequence in recorded.sequences:
        places = [one.start + n for one in sequence.images for n in range(one.tokens)]
        sampled = np.array(sequence.mask, bool)
        assert np.flatnonzero((np.array(sequence.tokens) == token) & ~sampled).tolist() == places
    assert other.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (parts("http://example.com/one.png"), "data URL"),
        (parts("data:image/png;base64,????"), "base64"),
        (parts("data:image/png;base64," + base64.b64encode(b"none").decode()), "damaged"),
        (parts("<image>", url()), "must not spell"),
        (parts(*[wide() for _ in range(2)]), "have 89391104 pixels together, more than 67108864"),
        (parts(*[url()] * 100), "images of 600 tokens, and the context is"),
        ([{"role": "system", "content": parts(url())[0]["content"]}], "users' and tools'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "image_url"),
    ],
)
def test_invalid_images_get_typed_errors(sees, messages, words):
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        chat(sees[0], messages)
    assert refused.value.param == "messages"


def test_text_model_refuses_images():
    with served_models.served() as (server, _):
        address, key = f"{server.address}/v1", served_models.TOKEN
        with (
            openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client,
            pytest.raises(openai.BadRequestError, match="only text"),
        ):
            chat(client, parts(url()), model="tiny")


def test_terminal_chat_sends_images(tmp_path):
    (tmp_path / "one.png").write_bytes(b"an image")
    asked = []

    def create(messages, **_):
        asked.append(messages[-1]["content"])
        return iter(())

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    flags = SimpleNamespace(system=None, seed=None, max_tokens=None, temperature=1.0)
    words = iter([f"/image {tmp_path}/none.png", f"/image {tmp_path}/one.png", "What is it?", "And now?", ""])
    terminal.chat(client, "policy", flags, ask=lambda: next(words))
    (shown, text), later = asked
    assert shown["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"an image").decode()
    assert text == {"type": "text", "text": "What is it?"} and later == "And now?"


def test_failed_answer_leaves_the_chat_unchanged(capsys):
    asked = []

    def create(messages, **_):
        asked.append([message["content"] for message in messages])
        if len(asked) == 2:
            raise openai.APIError("no room [/red] now", httpx2.Request("POST", "http://a"), body=None)
        said = SimpleNamespace(delta=SimpleNamespace(content="Hi."), finish_reason="stop")
        return iter([SimpleNamespace(choices=[said])])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    flags = SimpleNamespace(system=None, seed=None, max_tokens=None, temperature=1.0)
    words = iter(["Tom?", "/again", "/again", "And now?", ""])
    terminal.chat(client, "policy", flags, ask=lambda: next(words))
    assert asked == [["Tom?"], ["Tom?"], ["Tom?"], ["Tom?", "Hi.", "And now?"]]
    assert "no room [/red] now" in capsys.readouterr().out


def test_policy_flags_are_refused_with_a_server(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["chat", "http://127.0.0.1:9/v1", "--vision", "--tensor", "2"])
    with pytest.raises(Refusal, match="--vision, --tensor cannot be used with a server"):
        terminal.main()


def test_invalid_host_name_is_refused():
    with pytest.raises(Refusal, match=r"cannot listen at a\.\.b:0"):
        HttpServer(host="a..b", port=0, flags="--host")
