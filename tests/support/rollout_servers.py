"""Made-up servers with the interfaces of vLLM 0.32.0 and SGLang 0.5.23, which run transformers on what they are sent.

vLLM's are in `vllm/entrypoints/`: `openai/completion/protocol.py`, `scale_out/token_in_token_out/protocol.py`,
`serve/dev/` and `rl/online/api_router.py`; what a reload does to a module without one of its parts is in
`vllm/model_executor/model_loader/reload/layerwise.py`. SGLang's are in `sglang/srt/`: `managers/io_struct.py`,
`entrypoints/http_server.py`, `model_executor/model_runner_components/weight_updater.py` and, for experts,
`state_capturer/routed_experts.py`.
"""

import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import PIL.Image
import torch
import transformers
from safetensors.torch import load_file

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("experts",))
"""Matrices that vLLM has in one parameter."""
_LOADING = threading.Lock()
"""Held by a thread that loads a model: `from_pretrained` replaces a method of all models for a while."""


class RolloutServer(ThreadingHTTPServer):
    """Draws with the model of a checkpoint, at a temperature, until a stop token or the limit.

    Attributes:
      loaded: Folders of the weights that it was told to read.
      read: Names of the tensors in each of these folders.
      version: Name that it was told the weights have.
      asked: Bodies of the requests for responses.
      routes: True if it was started with `--enable-return-routed-experts`.
      counts_on: True while vLLM's scheduler counts on features of images that a reload dropped; a request with images
        would end it.
    """

    daemon_threads = True

    def __init__(self, checkpoint, *, routes=False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.checkpoint, self.routes = Path(checkpoint), routes
        self.loaded, self.read, self.asked, self.lock = [], [], [], threading.Lock()
        self.start()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def start(self) -> None:
        """Start, or restart, with the weights of the command line."""
        self.config = transformers.AutoConfig.from_pretrained(self.checkpoint)
        self.sees = hasattr(self.config, "vision_config")
        if self.sees:
            self.processor = transformers.AutoImageProcessor.from_pretrained(self.checkpoint, backend="pil")
        self.tensors, self.version, self.counts_on = tensors_of(self.checkpoint), "default", False
        self._build()

    def load(self, folder, *, fuses) -> None:
        """Read the tensors in a folder; the others stay, except the rest of a fused parameter, which is not filled."""
        given = tensors_of(folder)
        assert given and given.keys() <= self.tensors.keys()
        if fuses:
            self.counts_on = True
            parts = {module_of(name) for name in given}
            for name in self.tensors.keys() - given.keys():
                if module_of(name) in parts:
                    self.tensors[name] = torch.full_like(self.tensors[name], torch.nan)
        self.tensors |= given
        self._build()
        self.loaded.append(folder.name)
        self.read.append(set(given))

    def _build(self) -> None:
        kind = getattr(transformers, self.config.architectures[0])
        how = {"config": self.config, "dtype": torch.float32, "attn_implementation": "eager"}
        with _LOADING:
            self.model = kind.from_pretrained(None, state_dict=dict(self.tensors), **how).eval()

    def seen(self, prompt, urls):
        """The prompt with a placeholder for each feature of its images, and the model's inputs for their pixels."""
        if not urls:
            return prompt, {}
        pictures = [PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        pixels = self.processor(images=pictures, return_tensors="pt")
        features = iter((pixels["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist())
        mark = self.config.image_token_id
        expanded = [token for one in prompt for token in ([mark] * next(features) if one == mark else [one])]
        return expanded, dict(pixels)

    @torch.no_grad()
    def draw(self, prompt, urls=(), *, temperature, most, stop, seed):
        """The prompt as the model saw it, tokens, their log-probabilities, what ended them, and the experts."""
        generator = torch.Generator().manual_seed(seed)
        prompt, seen = self.seen(prompt, urls)
        tokens, logps, reason = [], [], "length"
        while len(tokens) < most and reason == "length":
            logits_V = self.run(prompt + tokens, seen).logits[0, -1]
            logp_V = logits_V.div(temperature or 1.0).log_softmax(-1)
            one = torch.multinomial(logp_V.exp(), 1, generator=generator)[0] if temperature else logp_V.argmax()
            tokens.append(int(one))
            logps.append(float(logp_V[one]))
            reason = "stop" if tokens[-1] in stop else "length"
        choice_TLk = None
        if self.routes:
            routed = self.run((prompt + tokens)[:-1], seen, output_router_logits=True).router_logits
            each = self.config.num_experts_per_tok
            choice_TLk = torch.stack([one.topk(each).indices for one in routed], dim=1).numpy().astype(np.int32)
        return prompt, tokens, logps, reason, choice_TLk

    def run(self, tokens, seen, **how):
        token_1T = torch.tensor([tokens])
        if self.sees:
            how["mm_token_type_ids"] = (token_1T == self.config.image_token_id).int()
        return self.model(token_1T, **seen, **how)


def tensors_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def module_of(name):
    """The module of a tensor; modules that vLLM fuses have one name."""
    for parts in FUSED:
        for part in parts:
            if f".{part}." in name:
                return name.partition(f".{part}.")[0] + f".{parts[0]}"
    return name.rpartition(".")[0]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.path in ("/health", "/weight_info", "/model_info")
        self._reply(b"" if self.path == "/health" else json.dumps({"weight_version": self.server.version}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        forms = {"/v1/completions": self._vllm, "/inference/v1/generate": self._vllm_tokens, "/generate": self._sglang}
        with self.server.lock:
            self._reply(forms.get(self.path, self._load)(body))

    def _vllm(self, body) -> bytes:
        _, tokens, logps, reason, choice_TLk = self._sampled(body["prompt"], body)
        choice = {"index": 0, "text": "", "finish_reason": reason, "routed_experts": written(choice_TLk)}
        if body["return_token_ids"]:
            choice["token_ids"] = tokens
        if body["logprobs"] is not None:
            choice["logprobs"] = {"token_logprobs": logps, "tokens": [], "top_logprobs": []}
        return json.dumps({"object": "text_completion", "choices": [choice]}).encode()

    def _vllm_tokens(self, body) -> bytes:
        parts = body["content_parts"]
        assert {part["type"] for part in parts} == {"image_url"} and not self.server.counts_on
        urls = [part["url"] for part in parts]
        prompt, tokens, logps, reason, choice_TLk = self._sampled(body["token_ids"], body["sampling_params"], urls)
        content = [{"token_id": token, "logprob": logp} for token, logp in zip(tokens, logps, strict=True)]
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}}
        choice["routed_experts"] = written(choice_TLk)
        seen = prompt if body["return_token_ids"] else None
        return json.dumps({"output_mode": "tokens", "prompt_token_ids": seen, "choices": [choice]}).encode()

    def _sampled(self, prompt, given, urls=()):
        """Sample with the given settings, which have the same names in both interfaces of vLLM."""
        self.server.asked.append({"prompt": prompt, "images": len(urls)})
        ends = {"most": given["max_tokens"], "stop": given["stop_token_ids"]}
        return self.server.draw(prompt, urls, temperature=given["temperature"], seed=given["seed"], **ends)

    def _sglang(self, body) -> bytes:
        urls, given = body.get("image_data", ()), body["sampling_params"]
        self.server.asked.append({"prompt": body["input_ids"], "images": len(urls)})
        prompt, tokens, logps, reason, choice_TLk = self.server.draw(
            body["input_ids"],
            urls,
            temperature=given["temperature"],
            most=given["max_new_tokens"],
            stop=given["stop_token_ids"],
            seed=given["sampling_seed"],
        )
        about = {"finish_reason": {"type": reason}, "weight_version": self.server.version}
        if body["return_logprob"]:
            about["output_token_logprobs"] = [[logp, token, None] for logp, token in zip(logps, tokens, strict=True)]
        if body.get("return_routed_experts") and choice_TLk is not None:
            about["routed_experts"] = base64.b64encode(choice_TLk.tobytes()).decode()
        reply = {"text": "", "output_ids": tokens, "meta_info": about}
        if body.get("return_prompt_token_ids"):
            reply["prompt_token_ids"] = prompt
        return json.dumps(reply).encode()

    def _load(self, body) -> bytes:
        match self.path:
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                self.server.load(Path(body["kwargs"]["weights_path"]), fuses=True)
                return b'{"results": [null]}'
            case "/reset_prefix_cache":
                return b'{"success": true}'
            case "/reset_encoder_cache":
                self.server.counts_on = False
                return b""
            case "/update_weight_version":
                self.server.version = body["new_version"]
                return b'{"success": true}'
            case "/update_weights_from_disk":
                self.server.load(Path(body["model_path"]), fuses=False)
                self.server.version = body["weight_version"]
                return b'{"success": true, "message": "Succeeded."}'
        raise AssertionError(self.path)

    def _reply(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_) -> None: ...


def written(choice_TLk):
    """Experts as vLLM writes them: a `.npy` file of small integers in base 64."""
    if choice_TLk is None:
        return None
    file = io.BytesIO()
    np.save(file, choice_TLk.astype(np.uint8))
    return base64.b64encode(file.getvalue()).decode()
