"""Another rollout engine than this project's: a made-up server that runs transformers on the tensors it is sent."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tiny_runs import records, served_config, training, write_policy

import jaxrlhf
from jaxrlhf.config import GRPO, Lora
from jaxrlhf.engine import Completion
from jaxrlhf.workers.build import Builder


class MadeUpServer:
    """Keeps a model of transformers, whose tensors it is sent by name; answers with tokens and their logps."""

    def __init__(self, checkpoint: str, *, most_tokens: int, stop: int) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.most_tokens, self.stop = most_tokens, stop
        self.versions: list[int] = []

    def update_weights(self, weights) -> None:
        sent = {name: torch.tensor(tensor) for name, tensor in weights.tensors(np.float32)}
        missing, unexpected = self.model.load_state_dict(sent, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # which is the embeddings
        self.versions.append(weights.version)

    def unload(self) -> None:
        """The server's memory is its own."""

    def compile_ahead(self, prompt_lengths) -> None:
        """Nothing is compiled."""

    def generate(self, requests, sampling, *, seed, progress=None, on_completion=None):
        found = []
        for request in requests:
            found.append(self.answer(request, sampling, seed))
            if on_completion is not None:
                on_completion(found[-1])
        return found

    @torch.no_grad()
    def answer(self, request, sampling, seed) -> Completion:
        draw = torch.Generator().manual_seed((seed * 1_000_003 + request.request_id) % 2**32)
        tokens, logps = list(request.prompt_tokens), []
        while len(logps) < self.most_tokens and not (logps and tokens[-1] == self.stop):
            logp_V = self.model(torch.tensor([tokens])).logits[0, -1].div(sampling.temperature).log_softmax(-1)
            chosen = logp_V.argmax() if sampling.greedy else torch.multinomial(logp_V.exp(), 1, generator=draw)[0]
            tokens.append(int(chosen))
            logps.append(float(logp_V[chosen]))
        own = tuple(tokens[len(request.prompt_tokens) :])
        return Completion(request.request_id, own, tuple(logps), own[-1] != self.stop, self.versions[-1])


@pytest.mark.usefixtures("programs", "undrawn")
@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, marks=pytest.mark.seeds), pytest.param(Lora(rank=2), marks=pytest.mark.slow)],
    ids=["whole", "lora"],
)
def test_a_run_generates_with_an_engine_of_another_kind(lora, tmp_path, monkeypatch):
    policy, servers = write_policy(tmp_path / "policy"), []
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)

    def engine(builder, submesh, share):
        servers.append(MadeUpServer(str(policy), most_tokens=6, stop=tokenizer.eos_token_id))
        return servers[-1]

    monkeypatch.setattr(Builder, "rollout_engine", engine)
    config = served_config(policy, tmp_path / "run", None, max_response_tokens=6)
    algorithm = GRPO(responses_per_update=16, old_logp="trainer")
    jaxrlhf.run(replace(config, algorithm=algorithm, actor=replace(training(), lora=lora)))
    [server] = servers
    assert sorted(set(server.versions)) == [0, 1, 2]  # before each step, and to evaluate what came out
    steps = [record for record in records(tmp_path / "run" / "metrics.jsonl") if "sampler/logp_gap_max" in record]
    assert [record["step"] for record in steps] == [1, 2]
    # The weights of the second step were trained, so the server has them, adapters merged.
    assert all(record["sampler/logp_gap_max"] < 1e-4 for record in steps)
    assert steps[0]["actor/grad_norm"] > 0
