"""A model served by JetStream's own orchestrator and gRPC server, with its own client."""

import socket

import pytest

pytest.importorskip("jetstream")

import grpc
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from served_models import served

from jaxrlhf.config import Sampling
from jaxrlhf.engine import Request
from jaxrlhf.serving.jetstream import serve

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of tensorflow and seqio
GREEDY = Sampling(top_k=1)


@pytest.fixture(scope="module")
def asked():
    """Client, and the served model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served() as (_, model):
        server = serve(model, GREEDY, port=port)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield jetstream_pb2_grpc.OrchestratorStub(channel), model
        server.stop()


def expected(model, prompt, most):
    """Tokens that the engine itself samples greedily."""
    request = Request(0, prompt, max_tokens=most, stop_tokens=model.stop_tokens)
    return model.service.submit(request, GREEDY, seed=0).result(60).tokens


def test_decoded_texts_and_ids_equal_the_engines(asked):
    client, model = asked
    for text in ("Tom has 3", "12+34=", "Tom has 5 apples."):
        prompt = model.tokens_of(text)
        tokens = [one for one in expected(model, prompt, 9) if one not in model.stop_tokens]
        ids = jetstream_pb2.DecodeRequest(
            token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt), max_tokens=9
        )
        sampled = [one for part in client.Decode(ids) for one in part.stream_content.samples[0].token_ids]
        assert sampled == tokens
        words = jetstream_pb2.DecodeRequest(
            text_content=jetstream_pb2.DecodeRequest.TextContent(text=text), max_tokens=9
        )
        said = "".join(part.stream_content.samples[0].text for part in client.Decode(words))
        assert said == "".join(model.tokenizer.decode([one]) for one in tokens)


def test_more_requests_than_slots_are_answered(asked):
    client, model = asked
    slots = model.service.engine.slots
    prompts = [model.tokens_of(f"Tom has {number}") for number in range(slots + 5)]
    streams = [
        client.Decode(
            jetstream_pb2.DecodeRequest(
                token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompt), max_tokens=5
            )
        )
        for prompt in prompts
    ]
    for prompt, stream in zip(prompts, streams, strict=True):
        sampled = [one for part in stream for one in part.stream_content.samples[0].token_ids]
        assert sampled == [one for one in expected(model, prompt, 5) if one not in model.stop_tokens]
    assert client.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live


def test_invalid_request_gets_an_empty_answer(asked):
    client, _ = asked
    outside = jetstream_pb2.DecodeRequest.TokenContent(token_ids=[10**6])
    parts = client.Decode(jetstream_pb2.DecodeRequest(token_content=outside, max_tokens=5))
    assert not [one for part in parts for one in part.stream_content.samples[0].token_ids]
    assert client.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
