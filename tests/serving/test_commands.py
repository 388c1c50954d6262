"""Commands that serve a policy and chat with it, as a user starts them."""

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import openai
import pytest
import transformers
from tiny_runs import write_policy

from jaxrlhf import chat
from jaxrlhf.config import GRPO, Evaluation, Refusal
from jaxrlhf.tracking import default_console

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs")]
SIZES = ("--context", "48", "--max-tokens", "16", "--slots", "2", "--dtype", "float32")
DEVICES = {"JAX_NUM_CPU_DEVICES": "2"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy") / "mine")


@pytest.fixture(scope="module")
def server(policy):
    """Address and key, as printed by the command."""
    command = [sys.executable, "-m", "jaxrlhf.serve", str(policy), "--port", "0", *SIZES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | DEVICES) as process:
        assert process.stdout is not None
        first, second = process.stdout.readline().split(), process.stdout.readline().split()
        assert first[:3] == ["serving", "mine", "at"], first
        try:
            yield first[3], second[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()


def test_served_completions_equal_transformers(server, policy):
    address, key = server
    assert address.startswith("http://127.0.0.1:")
    model = transformers.AutoModelForCausalLM.from_pretrained(policy)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(policy)
    ids = tokenizer("Tom has 12 apples", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    with openai.OpenAI(base_url=address, api_key=key) as client:
        answer = client.completions.create(
            model="mine", prompt=ids[0].tolist(), max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
        )
        assert answer.choices[0].token_ids == expected
    with openai.OpenAI(base_url=address, api_key="another") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_chat_keeps_its_history_and_survives_an_error(server, monkeypatch, capsys):
    address, key = server
    asked = iter(["Tom has 3.", "/again", "/new", "x" * 200, "Tom?", ""])
    monkeypatch.setattr(type(default_console()), "input", lambda self, prompt: next(asked))
    monkeypatch.setattr(sys, "argv", ["chat", address, "--api-key", key, "--seed", "1", "--max-tokens", "4"])
    chat.main()
    shown = capsys.readouterr().out
    assert "mine:" in shown
    assert "shorten it" in shown, "an error is printed, and the chat continues"
    assert next(asked, None) is None
    monkeypatch.setattr(sys, "argv", ["chat", "http://127.0.0.1:9/v1"])
    with pytest.raises(Refusal, match="; start it"):
        chat.main()


class NoModels(BaseHTTPRequestHandler):
    """Handler of a server that lists no models."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": []}')

    def log_message(self, *said):
        pass


def test_chat_refuses_a_server_without_models(monkeypatch):
    with HTTPServer(("127.0.0.1", 0), NoModels) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setattr(sys, "argv", ["chat", f"http://127.0.0.1:{server.server_port}/v1"])
        with pytest.raises(Refusal, match="lists no models; give --model"):
            chat.main()
        thread.join()


def test_chat_serves_a_local_policy(policy):
    command = [sys.executable, "-m", "jaxrlhf.chat", str(policy), *SIZES, "--temperature", "0"]
    asked = {"input": "Tom has 3.\n\n", "stdout": subprocess.PIPE, "text": True, "env": os.environ | DEVICES}
    done = subprocess.run(command, timeout=300, **asked)
    assert done.returncode == 0
    greeting, answer, _ = done.stdout.split("you ")
    assert greeting.startswith("policy: ")
    assert answer.strip()


def test_served_weights_of_a_run_equal_exported_weights(tmp_path):
    from dataclasses import replace

    import jax
    from tiny_runs import get_config

    from jaxrlhf.trainer.policy import export_policy
    from jaxrlhf.trainer.run import run
    from jaxrlhf.trainer.served_policy.flags import EngineSizes
    from jaxrlhf.trainer.served_policy.load import load_policy

    config = replace(
        get_config(),
        steps=1,
        cold_start=None,
        algorithm=GRPO(responses_per_update=16),
        evaluation=Evaluation(every_steps=0, problems=2),
        workdir=str(tmp_path / "run"),
    )
    run(config)
    export_policy(tmp_path / "run", tmp_path / "export")
    sizes = EngineSizes(slots=2, context_tokens=64, response_tokens=16, dtype="float32")
    ours, exported = (load_policy(str(tmp_path / name), sizes).engine for name in ("run", "export"))
    assert (ours.weights.version, exported.weights.version) == (1, 0)
    jax.tree.map(np.testing.assert_array_equal, ours.weights.layers(), exported.weights.layers())
