"""Made-up servers with the interfaces of vLLM and SGLang, which run transformers on what they are told to read."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


class RolloutServer(ThreadingHTTPServer):
    """Draws with the model of a checkpoint, at a temperature, until a stop token or the limit.

    Attributes:
      loaded: Folders of the weights that it was told to read.
      version: Name that it was told the weights have.
      asked: Bodies of the requests for responses.
    """

    daemon_threads = True

    def __init__(self, checkpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.loaded, self.asked, self.lock = [], [], threading.Lock()
        self.version = "default"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def load(self, folder) -> None:
        files = sorted(folder.glob("*.safetensors"))
        state = {name: tensor for file in files for name, tensor in load_file(file).items()}
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # which is the embeddings
        self.loaded.append(folder.name)

    @torch.no_grad()
    def draw(self, prompt, *, temperature, most, stop, seed):
        """Tokens, their log-probabilities, and what ended them."""
        generator = torch.Generator().manual_seed(seed)
        tokens, logps = [], []
        while len(tokens) < most:
            logits_V = self.model(torch.tensor([prompt + tokens])).logits[0, -1]
            logp_V = logits_V.div(temperature or 1.0).log_softmax(-1)
            one = torch.multinomial(logp_V.exp(), 1, generator=generator)[0] if temperature else logp_V.argmax()
            tokens.append(int(one))
            logps.append(float(logp_V[one]))
            if tokens[-1] in stop:
                return tokens, logps, "stop"
        return tokens, logps, "length"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.path in ("/health", "/weight_info")
        self._reply(b"" if self.path == "/health" else json.dumps({"weight_version": self.server.version}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self._reply({"/v1/completions": self._vllm, "/generate": self._sglang}.get(self.path, self._load)(body))

    def _vllm(self, body) -> bytes:
        self.server.asked.append(body)
        tokens, logps, reason = self.server.draw(
            body["prompt"],
            temperature=body["temperature"],
            most=body["max_tokens"],
            stop=body["stop_token_ids"],
            seed=body["seed"],
        )
        choice = {"index": 0, "text": "", "finish_reason": reason}
        if body["return_token_ids"]:
            choice["token_ids"] = tokens
        if body["logprobs"] is not None:
            choice["logprobs"] = {"token_logprobs": logps, "tokens": [], "top_logprobs": []}
        return json.dumps({"object": "text_completion", "choices": [choice]}).encode()

    def _sglang(self, body) -> bytes:
        self.server.asked.append(body)
        given = body["sampling_params"]
        tokens, logps, reason = self.server.draw(
            body["input_ids"],
            temperature=given["temperature"],
            most=given["max_new_tokens"],
            stop=given["stop_token_ids"],
            seed=given["sampling_seed"],
        )
        about = {"finish_reason": {"type": reason}, "weight_version": self.server.version}
        if body["return_logprob"]:
            about["output_token_logprobs"] = [[logp, token, None] for logp, token in zip(logps, tokens, strict=True)]
        return json.dumps({"text": "", "output_ids": tokens, "meta_info": about}).encode()

    def _load(self, body) -> bytes:
        match self.path:
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                self.server.load(Path(body["kwargs"]["weights_path"]))
                return b'{"results": [null]}'
            case "/reset_prefix_cache":
                return b'{"success": true}'
            case "/update_weight_version":
                self.server.version = body["new_version"]
                return b'{"success": true}'
            case "/update_weights_from_disk":
                self.server.load(Path(body["model_path"]))
                self.server.version = body["weight_version"]
                return b'{"success": true, "message": "Succeeded."}'
        raise AssertionError(self.path)

    def _reply(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_) -> None: ...
