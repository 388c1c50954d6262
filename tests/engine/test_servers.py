"""Rollouts from servers of other engines: runs with made-up ones of both kinds, and servers that fail or lie."""

import base64
import threading
from dataclasses import replace

import numpy as np
import pytest
import rollout_servers
from tiny_runs import get_config

import jaxrlhf
from jaxrlhf.batch import Image
from jaxrlhf.config import (
    GRPO,
    Agent,
    Refusal,
    RolloutServer,
    Sampling,
    Shapes,
    Tower,
    TruncatedImportance,
    checked,
)
from jaxrlhf.engine import Request
from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.engine.servers.server_engine import ServerEngine
from jaxrlhf.engine.servers.server_service import ServerService
from jaxrlhf.engine.servers.weight_files import WeightFiles
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.vision import reader
from jaxrlhf.rewards import endpoint
from jaxrlhf.rewards.endpoint import Rejected, Unreachable, Unreadable
from tests.rewards.test_http import Server

SHAPE = ModelConfig(
    family="qwen2",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
)
pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.02)


def completion(tokens=(5, 6, 2), logps=(-0.5, -0.25, -1.0), reason="stop"):
    return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logps}, "finish_reason": reason}]}


def generated(weights, token=5, logp=-0.5, reason="stop"):
    sampled = {"output_token_logprobs": [[logp, token, None]], "finish_reason": {"type": reason}}
    return {"output_ids": [token], "meta_info": sampled | {"weight_version": str(weights)}}


@pytest.fixture
def engine_of(tmp_path):
    """Engine whose server answers requests for responses as is told, and loads version 3 at once."""
    servers = []

    def make(answer, *, api="vllm", loads=None, has=None, logps=None, model=SHAPE, records_routing=False, **settings):
        named = {"weight_version": "default"}

        def reply(body, number):
            if body is None:
                return 200, {"weight_version": has} if has else named
            if name := body.get("new_version", body.get("weight_version")):
                named["weight_version"] = name
            if "new_version" in body or "method" in body or "model_path" in body or not body:
                return loads or (200, {"success": True})
            return answer(body, number)

        servers.append(Server(reply))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        engine = ServerEngine(
            RolloutServer((servers[-1].url,), api=api, **settings),
            model,
            WeightFiles(tmp_path / "weights", "whole", lambda weights, folder: folder.mkdir(parents=True), np.float32),
            logps,
            max_response_tokens=4,
            stop_tokens=(2,),
            stop_texts=("</a>",),
            image_url=lambda image: f"url of {image.digest}",
            records_routing=records_routing,
        )
        engine.update_weights(PolicyWeights(SHAPE, {}, version=3))
        return engine

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(engine, count=3, **sampling):
    return engine.generate([Request(index, (1, 2 + index)) for index in range(count)], Sampling(**sampling), seed=7)


def test_what_is_asked_and_answered(engine_of):
    bodies = {}

    def answer(body, number):
        bodies[tuple(body["prompt"])] = body
        if body["prompt"][1] == 3:
            return 200, completion((3, 3, 3, 4), (-1.0,) * 4, "length")
        return 200, completion((body["prompt"][1], 2), (-1.0, -2.0))

    found = ask(engine_of(answer, api_key_env=None), temperature=0.5, top_k=4, min_p=0.1, min_tokens=1)
    assert [one.request_id for one in found] == [0, 1, 2]
    assert [one.tokens for one in found] == [(2, 2), (3, 3, 3, 4), (4, 2)]
    assert [one.truncated for one in found] == [False, True, False]
    assert {one.version for one in found} == {3} and found[0].logps == (-1.0, -2.0)
    first = bodies[1, 2]
    assert (first["max_tokens"], first["min_tokens"], first["temperature"], first["top_k"]) == (4, 1, 0.5, 4)
    assert first["min_p"] == 0.1 and first["repetition_penalty"] == 1.0
    assert first["stop_token_ids"] == [2] and first["stop"] == ["</a>"] and first["return_token_ids"] is True
    assert len({body["seed"] for body in bodies.values()}) == 3


def test_what_is_answered_first_is_heard_first(engine_of):
    heard, others = [], threading.Event()

    def answer(body, number):
        if body["prompt"][1] == 2:
            others.wait(20)
        return 200, completion((body["prompt"][1], 2), (-1.0, -2.0))

    def hear(one):
        heard.append(one.request_id)
        if len(heard) == 2:
            others.set()

    requests = [Request(index, (1, 2 + index)) for index in range(3)]
    found = engine_of(answer).generate(requests, Sampling(), seed=7, on_completion=hear)
    assert [one.request_id for one in found] == [0, 1, 2]
    assert heard[2] == 0 and others.is_set()


def test_what_passes_is_asked_again(engine_of):
    def answer(body, number):
        return (503, {}) if number % 2 else (200, completion())

    assert len(ask(engine_of(answer))) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (completion(logps=(-0.5,)), "3 tokens and 1 log-probabilities, expected 1 to 4 of each"),
        (completion((), ()), "0 tokens and 0 log-probabilities"),
        (completion((1,) * 5, (-1.0,) * 5), "5 tokens"),
        (completion(tokens=(5, 10, 2)), "token ids [10], expected ids below 10"),
        (completion(logps=(0.5, -1.0, -1.0)), "log-probabilities [0.5]"),
        (completion(logps=(None, -1.0, -1.0)), "TypeError"),
        (
            completion(reason="length"),
            "truncated after 3 of 4 tokens; start the server with a context (vLLM: --max-model-len",
        ),
        (completion(reason="abort"), "the server aborted the response: abort"),
        ({"choices": []}, "ValueError"),
        ({"error": "no"}, "KeyError"),
    ],
)
def test_an_answer_that_nobody_can_have_sampled_ends_the_run(engine_of, reply, said):
    with pytest.raises(Unreadable) as caught:
        ask(engine_of(lambda body, number: (200, reply)))
    assert said in str(caught.value) and "vllm response to request" in str(caught.value)


def test_weights_that_were_not_sent_are_noticed(engine_of, tmp_path):
    """A server that another run uses, and one that was started anew while it was asked."""
    sent = tmp_path / "weights" / "version_3"
    assert ask(engine_of(lambda body, number: (200, generated(sent)), api="sglang"))[0].tokens == (5,)
    with pytest.raises(Unreadable, match=r"sampled with weights '/a/version_3', expected '.*version_3'; .* other run"):
        ask(engine_of(lambda body, number: (200, generated("/a/version_3")), api="sglang"))
    with pytest.raises(Unreadable, match="the server aborted the response"):
        ask(engine_of(lambda body, number: (200, generated(sent, reason="abort")), api="sglang"))
    with pytest.raises(Unreadable, match=r"weight_info returned .*'default'.*version_3'; check that no other run uses"):
        ask(engine_of(lambda body, number: (200, completion()), has="default"))


def test_a_service_holds_requests_until_the_next_weights(engine_of, tmp_path):
    engine = engine_of(lambda body, number: (200, completion((body["prompt"][0], 2), (-1.0, -2.0))))
    service = ServerService(engine)
    service.hold()
    held = service.submit(Request(1, (7, 1)), Sampling(), seed=3)
    assert not held.done() and not (tmp_path / "weights").exists()
    service.resume()
    assert held.result(20).tokens == (7, 2) and held.result().version == 3
    assert service.submit(Request(2, (8, 1)), Sampling(), seed=3).result(20).tokens == (8, 2)
    service.hold()
    engine.update_weights(PolicyWeights(SHAPE, {}, version=4))
    held, dropped = (service.submit(Request(index, (6, 1)), Sampling(), seed=3) for index in (3, 4))
    assert dropped.cancel()
    service.resume()
    assert held.result(20).version == 4
    service.hold()
    left = service.submit(Request(5, (6, 1)), Sampling(), seed=3)
    service.close()
    assert left.cancelled()


def test_a_service_passes_errors_of_servers_on(engine_of):
    service = ServerService(engine_of(lambda body, number: (200, completion((1,) * 5, (-1.0,) * 5))))
    service.hold()
    asked = service.submit(Request(1, (7, 1)), Sampling(), seed=3)
    service.resume()
    with pytest.raises(Unreadable, match="5 tokens"):
        asked.result(20)
    service.close()
    service = ServerService(engine_of(lambda body, number: (200, completion()), has="default"))
    service.hold()
    asked = service.submit(Request(1, (7, 1)), Sampling(), seed=3)
    service.resume()
    asked.result(20)
    with pytest.raises(Unreadable, match="check that no other run uses"):
        service.hold()
    service.close()


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_new_weights_are_compared_before_the_first_response(engine_of, tmp_path, api):
    sent, asked = tmp_path / "weights" / "version_3", []

    def answer(body, number):
        asked.append(body)
        if api == "sglang":
            return 200, generated(sent, logp=-0.5)
        return 200, completion((5, 6, 7, 8), (-0.5, -1.0, -1.5, -2.0), "length")

    def own(difference):
        def logps(weights, tokens):
            assert weights.version == 3 and tokens[:8] == (1, 2, 3, 4, 5, 6, 7, 9)
            return np.concatenate([np.full(7, 9.0), difference + np.array([-0.5, -1.0, -1.5, -2.0][: len(tokens) - 8])])

        return logps

    assert len(ask(engine_of(answer, api=api, logps=own(0.05)), count=2)) == 2
    assert len(asked) == 3
    first = asked[0] if api == "vllm" else asked[0]["sampling_params"]
    assert first["temperature"] == 1.0 and first["ignore_eos"] is True and first["stop_token_ids"] == []
    with pytest.raises(
        Unreadable, match=r"version 3 .* differ from the trainer's by 0.3 nats per token, expected at most"
    ):
        ask(engine_of(answer, api=api, logps=own(-0.3)))
    assert len(asked) == 4  # and no response is asked for
    assert len(ask(engine_of(answer, api=api, logps=own(-0.3), largest_gap=0.5), count=1)) == 1
    with pytest.raises(Unreadable, match="by nan nats"):
        ask(engine_of(answer, api=api, logps=own(float("nan"))))


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_images_are_sent_with_a_placeholder_each(engine_of, tmp_path, api):
    asked, prompt = [], (1, 9, 9, 9, 3, 9, 4)  # and a placeholder that the policy sampled itself
    request = Request(0, prompt, images=(Image("", "first", (1, 2, 2), 1, 3), Image("", "second", (1, 2, 2), 5, 1)))

    def answer(reported):
        def of(body, number):
            asked.append(body)
            if api == "sglang":
                reply = generated(tmp_path / "weights" / "version_3")
                return 200, reply | ({} if reported is None else {"prompt_token_ids": reported})
            sampled = {"content": [{"token_id": 5, "logprob": -0.5}]}
            choice = {"token_ids": [5], "logprobs": sampled, "finish_reason": "stop"}
            return 200, {"choices": [choice], "prompt_token_ids": reported}

        return of

    [found] = engine_of(answer([*prompt]), api=api).generate([request], Sampling(top_k=3), seed=7)
    assert found.tokens == (5,) and found.logps == (-0.5,)
    [body] = asked
    assert body["token_ids" if api == "vllm" else "input_ids"] == [1, 9, 3, 9, 4]
    urls = [part["url"] for part in body["content_parts"]] if api == "vllm" else body["image_data"]
    assert body.get("return_token_ids", body.get("return_prompt_token_ids")) is True
    assert body["sampling_params"]["top_k"] == 3
    assert urls == ["url of first", "url of second"]
    with pytest.raises(Unreadable, match=r"reports a prompt of 6 tokens, expected the 7 tokens .* 2 images; start it"):
        engine_of(answer([*prompt[:-1]]), api=api).generate([request], Sampling(), seed=7)
    with pytest.raises(Unreadable, match="reports no prompt"):
        engine_of(answer(None), api=api).generate([request], Sampling(), seed=7)


ROUTED = replace(SHAPE, num_layers=3, dense_layers=1, experts=Experts(4, 2, 8))


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_experts_are_recorded_as_servers_report_them(engine_of, tmp_path, api):
    """Servers report the experts of every token but the last, in the layers that have experts."""
    choice_TLk = np.array([[[0, 0], [1, 2], [3, 0]], [[0, 0], [2, 1], [0, 1]]])

    def answer(choice_TLk):
        def of(body, number):
            if api == "sglang":
                assert body["return_routed_experts"] is True
                reply = generated(tmp_path / "weights" / "version_3")
                if choice_TLk is not None:
                    content = choice_TLk.astype(np.int32).tobytes()
                    reply["meta_info"]["routed_experts"] = base64.b64encode(content).decode()
                return 200, reply
            reply = completion((5,), (-0.5,))
            reply["choices"][0]["routed_experts"] = rollout_servers.written(choice_TLk)
            return 200, reply

        return of

    how = {"api": api, "model": ROUTED, "records_routing": True}
    [found] = ask(engine_of(answer(choice_TLk), **how), count=1)
    start, recorded = found.recorded["routing"]
    assert start == 0 and recorded.dtype == np.int16
    np.testing.assert_array_equal(recorded, choice_TLk[:, 1:])
    for wrong, said in (
        (None, "got no experts, .* start the server with --enable-return-routed-experts"),
        (choice_TLk[:1], "got 6 experts, expected those of 2 tokens in 3 layers with 2 choices"),
        (choice_TLk + 2, "expected 2 different ids below 4"),
        (np.zeros_like(choice_TLk), "expected 2 different ids below 4"),
    ):
        with pytest.raises(Unreadable, match=said):
            ask(engine_of(answer(wrong), **how), count=1)


def test_a_server_that_fails_is_named_in_bounded_time(engine_of):
    engine = engine_of(lambda body, number: (500, {}), request_s=0.3)
    with pytest.raises(Unreachable, match=engine.server.urls[0]):
        ask(engine)
    with pytest.raises(Rejected, match="404"):
        ask(engine_of(None, loads=(404, {})))
    with pytest.raises(Unreadable, match=r"did not load .*version_3: out of memory"):
        ask(engine_of(None, api="sglang", loads=(200, {"success": False, "message": "out of memory"})))
    with pytest.raises(Unreadable, match="still uses keys and values of older weights"):
        ask(engine_of(None, loads=(200, {"success": False})))
    # vLLM that cannot read the folder: it ends, and is not asked until `reload_s`.
    with pytest.raises(Rejected, match=r"collective_rpc answers 500 .*no such folder"):
        ask(engine_of(None, loads=(500, {"error": "no such folder"})))


def test_settings_that_servers_cannot_serve_are_refused(refused, tmp_path):
    server = RolloutServer(("http://127.0.0.1:9",))
    tiny = get_config()
    with refused():
        RolloutServer(())
    with refused():
        RolloutServer(("http://localhost:8000/v1",))
    with refused():
        replace(tiny.rollout, server=server, quantize="int8")
    rollout = replace(tiny.rollout, server=server)
    with refused():
        checked(replace(tiny, algorithm=GRPO(correction=None, responses_per_update=16), rollout=rollout))
    with refused():
        checked(replace(tiny, algorithm=GRPO(old_logp="sampler", responses_per_update=16), rollout=rollout))
    with refused():
        checked(replace(tiny, rollout=replace(rollout, speculation="auto")))
    with refused():
        agent = Agent(program="my_agent.py:play")
        checked(replace(tiny, algorithm=GRPO(responses_per_update=16), rollout=rollout, environment=agent))
    config = replace(tiny, algorithm=GRPO(responses_per_update=16), rollout=rollout, workdir=str(tmp_path))
    assert config.algorithm.correction_for(config.rollout) == TruncatedImportance()
    assert not config.algorithm.trusts_sampler(config.rollout)
    with pytest.raises(Refusal, match=r"http://127.0.0.1:9/health does not answer: .*start the server first"):
        jaxrlhf.run(config, dry_run=True)


def test_models_that_servers_cannot_serve_are_refused(refused, monkeypatch, tmp_path):
    tiny = get_config()
    rollout = replace(tiny.rollout, server=RolloutServer(("http://127.0.0.1:9",)))
    config = replace(tiny, algorithm=GRPO(responses_per_update=16), rollout=rollout, workdir=str(tmp_path))
    with refused():
        jaxrlhf.run(replace(config, rollout=replace(rollout, replay_routing=True)), dry_run=True)
    tower = Tower(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    sees = replace(config, model=replace(tiny.model, vision=tower), data=Shapes(train_problems=16, eval_problems=8))
    own = reader.placeholders_of
    monkeypatch.setattr(  # as Gemma 3's
        reader, "placeholders_of", lambda *of: replace(own(*of), expanded=lambda count: "\n" + "<|image_pad|>" * count)
    )
    with refused():
        jaxrlhf.run(sees, dry_run=True)
