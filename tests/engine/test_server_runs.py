"""Runs whose responses come from made-up servers of vLLM and SGLang, with what is sent to them and what they report."""

import hashlib
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import rollout_servers
import seeing
import tiny_episodes
import torch
from tiny_runs import records, served_config, training, write_policy

import jaxrlhf
from jaxrlhf import models
from jaxrlhf.config import GRPO, Environment, Lora, Pretrained, Rewards, RolloutServer, Sampling
from jaxrlhf.engine import Request
from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.engine.servers.server_engine import ServerEngine
from jaxrlhf.engine.servers.weight_files import WeightFiles

pytestmark = pytest.mark.usefixtures("programs", "undrawn", "here")


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.mark.parametrize(
    ("api", "lora", "sent"),
    [
        pytest.param("sglang", None, "whole", marks=pytest.mark.seeds, id="sglang"),
        pytest.param("vllm", Lora(rank=2), "changed", marks=pytest.mark.slow, id="vllm, adapters"),
    ],
)
def test_a_run_generates_with_servers(api, lora, sent, tmp_path):
    policy = write_policy(tmp_path / "policy")
    servers = [rollout_servers.RolloutServer(policy) for _ in range(2)]
    urls = tuple(server.url for server in servers)
    settings = RolloutServer(urls, api=api, folder=str(tmp_path / "shared"), weights=sent)
    sampled = {"max_response_tokens": 6, "sampling": Sampling(temperature=0.7)}
    config = served_config(policy, tmp_path / "run", settings, **sampled)
    jaxrlhf.run(replace(config, actor=replace(training(), lora=lora)))
    # Before each step, and to evaluate what came out; the folder keeps the newest.
    folder = tmp_path / "shared" / "tiny" / "server_weights"
    [newest] = folder.iterdir()
    for server in servers:
        assert [name[:9] for name in dict.fromkeys(server.loaded)] == [f"version_{step}" for step in range(3)]
        assert server.version == str(newest)
        assert len(server.asked) >= 16
        frozen = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
        assert server.read[0] == set(server.tensors)
        assert all(read == server.read[0] - (frozen if sent == "changed" else set()) for read in server.read[1:])
    steps = [record for record in records(tmp_path / "run" / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2]
    # The servers' log-probabilities are those of the weights that were trained, at the temperature.
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in steps)
    assert steps[0]["actor/grad_norm"] > 0
    whole = (policy / "model.safetensors").stat().st_size
    assert (steps[1]["server/read_bytes"] < whole - 4 * 2 * 448 * 32) == (sent == "changed")


@pytest.mark.slow
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_episodes_get_their_replies_from_servers(api, tmp_path):
    """Each turn continues the tokens before it, and its log-probabilities are those of the trained weights."""
    policy = write_policy(tmp_path / "policy")
    servers = [rollout_servers.RolloutServer(policy) for _ in range(2)]
    config = replace(
        tiny_episodes.get_config(),
        model=Pretrained(str(policy)),
        tokenizer=str(policy),
        algorithm=GRPO(responses_per_update=16),
        steps=2,
        workdir=str(tmp_path / "run"),
    )
    server = RolloutServer(tuple(server.url for server in servers), api=api)
    config = replace(
        config,
        rollout=replace(
            config.rollout, prompts_per_step=4, max_prompt_tokens=32, max_response_tokens=64, server=server
        ),
        algorithm=GRPO(responses_per_update=8),
        evaluation=replace(config.evaluation, every_steps=0, problems=2),
    )
    jaxrlhf.run(config)
    steps = [record for record in records(tmp_path / "run" / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in steps)
    assert all(record["episode/turns_mean"] == 3 for record in steps) and steps[0]["actor/grad_norm"] > 0
    for server in servers:
        assert [*dict.fromkeys(server.loaded)] == [f"version_{step}" for step in range(3)]
    prompts = [{tuple(body["prompt"]) for body in server.asked} for server in servers]
    # A later turn goes to the server that has the turns before it.
    continued = [
        [later for later in asked if any(len(first) > 8 and later[: len(first)] == first != later for first in asked)]
        for asked in prompts
    ]
    assert all(continued)


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_only_layers_that_changed_are_sent(api, tmp_path):
    """Servers keep what did not change; one that was started anew gets everything again."""
    policy = write_policy(tmp_path / "policy")
    servers = [rollout_servers.RolloutServer(policy) for _ in range(2)]
    config, dtype = models.read_config(policy), np.float32
    save = partial(PolicyWeights.save, dtype=dtype, tokenizer=None, source=str(policy))
    urls = tuple(server.url for server in servers)
    engine = ServerEngine(
        RolloutServer(urls, api=api, weights="changed", largest_gap=1e-4, request_s=20.0),
        config,
        WeightFiles(tmp_path / "weights", "changed", save, dtype),
        partial(PolicyWeights.logps, dtype=dtype),
        max_response_tokens=4,
        stop_tokens=(2,),
        stop_texts=(),
    )
    params = models.load_params(policy, config, "lm")

    def read_of(version):
        engine.update_weights(PolicyWeights(config, params, version))
        before = [len(server.read) for server in servers]
        found = engine.generate([Request(0, (5, 6, 7))], Sampling(), seed=1)
        assert {one.version for one in found} == {version}
        return [server.read[already:] for already, server in zip(before, servers, strict=True)]

    names = set(servers[0].tensors)
    assert read_of(0) == [[names]] * 2
    assert engine.take_metrics()["server/read_bytes"] > 4 * sum(map(torch.numel, servers[0].tensors.values()))
    query = params["layers"]["attention"]["query"]
    params["layers"]["attention"]["query"] = query.at[1].add(0.3)
    layer = {name for name in names if name.startswith("model.layers.1.")}
    assert read_of(1) == [[layer]] * 2 and 2 < len(layer) < len(names) / 2
    [folder] = (tmp_path / "weights").iterdir()
    written = json.loads((folder / "manifest.json").read_text())
    assert written["sent"] == sorted(layer) and "version_0_" in written["base"] and written["version"] == 1
    assert {server.version for server in servers} == {str(folder)}
    for name, tensor in servers[0].tensors.items():
        content = tensor.contiguous().numpy().tobytes()
        assert written["digests"][name] == hashlib.blake2b(content, digest_size=16).hexdigest()
    engine.take_metrics()
    assert read_of(2) == [[], []] and engine.take_metrics() == {}
    servers[1].start()
    params["final_norm"] = params["final_norm"] * 1.5
    assert read_of(3) == [[names]] * 2
    params["final_norm"] = params["final_norm"] * 1.5
    assert read_of(4) == [[{"model.norm.weight"}]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_servers_see_the_images_of_prompts_and_of_environments(api, tmp_path):
    """Their log-probabilities of what they sampled after an image are the trainer's."""
    policy = seeing.write_policy(tmp_path / "policy")
    server = rollout_servers.RolloutServer(policy)
    config = seeing.run_config(policy, tmp_path)
    settings = RolloutServer((server.url,), api=api, request_s=60.0)
    config = replace(config, rollout=replace(config.rollout, max_response_tokens=64, server=settings))
    if api == "sglang":  # each turn answers with another picture
        shows = Environment(
            factory="seeing_environments:ShowsOne",
            max_turns=2,
            turn_tokens=5,
            cut_turns="close",
            observation_tokens=48,
        )
        config = replace(config, environment=shows, rewards=Rewards(parts=()))
    jaxrlhf.run(config)
    steps = [record for record in records(tmp_path / "run" / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in steps)
    counts = {body["images"] for body in server.asked if body["images"]}
    assert counts == ({1} if api == "vllm" else {1, 2})


@pytest.mark.slow
@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_experts_of_servers_are_replayed(api, tmp_path):
    policy = write_policy(tmp_path / "policy", kind="qwen3-moe")
    server = rollout_servers.RolloutServer(policy, routes=True)
    settings = RolloutServer((server.url,), api=api)
    jaxrlhf.run(served_config(policy, tmp_path / "run", settings, replay_routing=True))
    steps = [record for record in records(tmp_path / "run" / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in steps)
    # One update a step, of what was just sampled: the trainer would choose the same experts.
    assert all(record["router/actor_disagreement"] == 0 for record in steps)
