"""Workloads of the benchmarks: checkpoints, prompts, reward, and measurements of memory and machine.

Other frameworks run the same workloads (`compare_peers.py`), so nothing of JAX is imported here at the top.
Word `t<i>` is token i. In the preset `tail` the weights give the end of a response probability 1/64 at every step; in
the other presets responses run to their limit.
"""

import argparse
import json
import os
import platform
import random
import re
import resource
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from scripts.pages import ROOT

END = 0
PAD = 1
END_PROBABILITY = 1 / 64
"""Probability of the end token at every step of a response, in a preset that ends."""
SHORTEST_PROMPT = 16
"""Minimum number of tokens of a prompt, in a preset that ends."""


@dataclass(frozen=True)
class Preset:
    """A Qwen2-shaped decoder with random weights.

    Attributes:
      ends: Whether responses end by themselves.
      positions: Maximum number of tokens of a sequence.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tied: bool = False
    ends: bool = False
    positions: int = 4096

    @property
    def matmul_parameters(self) -> int:
        """Number of weights that every token is multiplied with, except the head."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * self.heads * head_dim + 2 * self.hidden * self.kv_heads * head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        """Number of weights that a token is multiplied with for its logits."""
        return self.vocab * self.hidden


PRESETS = {
    "tiny": Preset(64, 2, 4, 2, 128, 512),
    "small": Preset(256, 8, 8, 4, 1024, 8192),
    "tail": Preset(256, 8, 8, 4, 1024, 8192, ends=True),
    "long": Preset(256, 8, 8, 4, 1024, 8192, positions=131_072),
    "qwen0p4b": Preset(896, 24, 14, 2, 4864, 32768, tied=True),
    "qwen0p5b": Preset(896, 24, 14, 2, 4864, 151_936, tied=True),  # the shape of Qwen2.5-0.5B
    "smollm2": Preset(576, 30, 9, 3, 1536, 49152, tied=True),  # the shape of SmolLM2-135M
}


@dataclass(frozen=True)
class Workload:
    """Work of one step.

    Attributes:
      prompt_tokens: Number of tokens of every prompt; in a preset that ends, the maximum, and 16 is the minimum.
      new_tokens: Number of tokens of every response; in a preset that ends, the maximum.
    """

    preset: str = "small"
    prompts: int = 8
    responses: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 128
    algorithm: str = "grpo"

    @property
    def sequences(self) -> int:
        return self.prompts * self.responses


def forward_flops(preset: Preset, sequences: int, length: int, read: int) -> float:
    """Return the FLOPs of a forward pass: weights, causal attention, and the head on `read` tokens of a sequence."""
    head_dim = preset.hidden // preset.heads
    attention = preset.layers * 4 * preset.heads * head_dim * length * (length + 1) / 2
    return sequences * (2 * length * preset.matmul_parameters + attention + 2 * read * preset.head_parameters)


WORKLOADS = {
    "fixed": Workload(),
    "fixed512": Workload(new_tokens=512),
    "longtail": Workload("tail", 16, 8, 128, 384),
    "ppo": Workload(prompts=64, responses=1, algorithm="ppo"),
    "big": Workload("qwen0p4b", 2, 4, 64, 64),
    "qwen": Workload("qwen0p5b", 2, 4, 64, 64),
}


def add_flags(
    parser: argparse.ArgumentParser, *, workload: str = "fixed", choices: Mapping[str, Workload] = WORKLOADS
) -> None:
    """Add flags for the workload, its sizes, and the folder of checkpoints."""
    parser.add_argument("--workload", choices=choices, default=workload)
    parser.add_argument("--preset", choices=PRESETS, help="preset of the model; by default the workload's")
    sizes = {"prompts": "prompts of a step", "responses": "responses to a prompt"}
    sizes |= {"prompt-tokens": "tokens of a prompt", "new-tokens": "tokens of a response"}
    for name, what in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what}; by default the workload's")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")


def workload_of(flags: argparse.Namespace, choices: Mapping[str, Workload] = WORKLOADS) -> Workload:
    """Return the workload that the flags choose."""
    sizes = {name: getattr(flags, name) for name in ("preset", "prompts", "responses", "prompt_tokens", "new_tokens")}
    return replace(choices[flags.workload], **{name: size for name, size in sizes.items() if size is not None})


def prompts(workload: Workload, *, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Sample random prompts as token ids."""
    draw, preset = random.Random(seed), PRESETS[workload.preset]
    shortest = SHORTEST_PROMPT if preset.ends else workload.prompt_tokens
    return [
        tuple(draw.randrange(2, preset.vocab) for _ in range(draw.randint(shortest, workload.prompt_tokens)))
        for _ in range(count)
    ]


def even_share(prompt: str, response: str, answer: str | None, record: Any) -> float:
    """Return the reward: the share of the response's tokens with an even id."""
    ids = [int(word) for word in re.findall(r"\bt(\d+)\b", response)]
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))


def checkpoint(preset: str, folder: Path) -> Path:
    """Return the folder of a Hugging Face checkpoint of the preset with its tokenizer; write it unless it exists."""
    place, unfinished = folder / preset, folder / f"{preset}.unfinished"
    if not place.exists():
        _write_checkpoint(PRESETS[preset], unfinished)
        unfinished.rename(place)
    return place


def checkpoint_of_bytes(preset: str, folder: Path) -> Path:
    """Return the folder of the checkpoint with a tokenizer for any text: ids 2 to 257 are bytes, others are ` t<i>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place, source = folder / f"{preset}_bytes", checkpoint(preset, folder)
    if not place.exists():
        place.mkdir()
        for name in ("model.safetensors", "config.json"):
            (place / name).symlink_to((source / name).resolve())
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [*letters, *(f"Ġt{index}" for index in range(2 + len(letters), PRESETS[preset].vocab))]
        ids = {"<eos>": END, "<pad>": PAD} | {word: 2 + index for index, word in enumerate(words)}
        fast = Tokenizer(models.BPE(ids, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        whole = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", pad_token="<pad>")
        whole.save_pretrained(str(place))
    return place


def _write_checkpoint(preset: Preset, place: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    place.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    width, head_dim = preset.hidden, preset.hidden // preset.heads
    queries, keys = preset.heads * head_dim, preset.kv_heads * head_dim

    def normal(*shape: int) -> Any:
        return (0.02 * draw.standard_normal(shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(preset.vocab, width), "model.norm.weight": np.ones(width, "f")}
    for index in range(preset.layers):
        layer = f"model.layers.{index}"
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = normal(size, width)
            tensors[f"{layer}.self_attn.{name}_proj.bias"] = np.zeros(size, "f")
        tensors[f"{layer}.self_attn.o_proj.weight"] = normal(width, queries)
        for name, shape in (
            ("gate", (preset.inner, width)),
            ("up", (preset.inner, width)),
            ("down", (width, preset.inner)),
        ):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(width, "f")
    if not preset.tied:
        tensors["lm_head.weight"] = normal(preset.vocab, width)
    if preset.ends:
        _end_at_random(tensors, preset)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": width,
        "intermediate_size": preset.inner,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "vocab_size": preset.vocab,
        "tie_word_embeddings": preset.tied,
        "max_position_embeddings": preset.positions,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }
    (place / "config.json").write_text(json.dumps(config, indent=2))
    # Ids past the vocabulary are never sampled, so that responses run to their limit in every framework.
    tokenizer(preset, outside=not preset.ends).save_pretrained(str(place))


def _end_at_random(tensors: dict[str, Any], preset: Preset) -> None:
    """Set weights so that the end token has probability 1/64 in every context.

    The end's logit reads coordinate 0 of the residual stream, which stays 1 and which the final norm divides by the
    root mean square of the stream. The layers' outputs are scaled down, so that the root mean square is that of the
    embedding in every context; otherwise the probability of the end would depend on the context.
    """
    import numpy as np

    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.01
            tensor[0] = 0.0
    stream = tensors["model.embed_tokens.weight"]
    scale = float(np.mean(1.0 / np.sqrt(np.mean(np.square(stream), axis=1) + 1e-6)))
    head = tensors["lm_head.weight"]
    head[:, 0] = 0.0
    head[END] = 0.0
    # The other logits are normal with variance |hidden|^2 x 0.02^2. The sum of their exponentials is their number
    # times exp(variance / 2).
    normal = stream[:, 1:] * scale
    variance = float(np.mean(np.sum(np.square(normal), axis=1))) * 0.02**2
    odds = END_PROBABILITY / (1 - END_PROBABILITY)
    head[END, 0] = (np.log(odds * (preset.vocab - 1)) + variance / 2) / scale


def tokenizer(preset: Preset, *, outside: bool) -> Any:
    """Return a tokenizer where word `t<i>` is token i; `<eos>` and `<pad>` are past the vocabulary, or ids 0 and 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end, pad = (preset.vocab, preset.vocab + 1) if outside else (END, PAD)
    words = {f"t{index}": index for index in range(preset.vocab) if outside or index not in (END, PAD)}
    model = models.WordLevel({**words, "<eos>": end, "<pad>": pad}, unk_token="t2")
    fast = Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Special tokens are split out of words too (t2 out of t27), so t2 must not be declared here as the unknown token.
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", pad_token="<pad>", padding_side="left")


class Watching(ABC):
    """Context manager that calls `look` in a thread every `period_s` seconds while the block runs."""

    def __init__(self, period_s: float) -> None:
        self._period_s, self._done = period_s, threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(self._period_s):
            self.look()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @abstractmethod
    def look(self) -> None:
        """Record the current value."""


class Memory(Watching):
    """Peak resident memory of this process and its children while the block runs, in MiB.

    The system records the peak of this process, from the start of the process on. The memory of children is sampled
    only twice a second, because a sample takes a core from the work: 20 samples a second made generation 5 to 18 %
    slower on two cores.
    """

    def __init__(self) -> None:
        super().__init__(period_s=0.5)
        self.peak_mb = 0.0

    def look(self) -> None:
        children = sum(map(_resident_mb, _children(os.getpid())))
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.peak_mb = max(self.peak_mb, own + children)


class Held(Watching):
    """Memory of this process while the block runs, minus the memory before the block.

    Attributes:
      peaks: Peak bytes of anonymous memory, and of mapped files.
    """

    def __init__(self, period_s: float) -> None:
        super().__init__(period_s)
        self._before, self.peaks = _held(), (0, 0)

    def look(self) -> None:
        own, mapped = (now - before for now, before in zip(_held(), self._before, strict=True))
        self.peaks = max(self.peaks[0], own), max(self.peaks[1], mapped)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.look()


def _held() -> tuple[int, int]:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped


def _children(parent: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        try:
            found += [int(each) for each in (task / "children").read_text().split()]
        except FileNotFoundError:  # the thread has ended
            continue
    return found + [grandchild for child in found for grandchild in _children(child)]


def _resident_mb(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # Pss divides shared memory among the processes, so that a forked child does not count pages of its parent again.
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of packages."""
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def processor() -> str:
    """Return the name of the processor, or the architecture if the system gives no name, and the number of cores."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    if name == "AMD EPYC":  # virtual machines use this name for Zen 4 and Zen 5
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """Return the short hash of the checked-out commit."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def about(*packages: str) -> dict[str, Any]:
    """Return machine, versions, commit and date of a measurement."""
    now = time.strftime("%Y-%m-%d")
    return {"processor": processor(), "versions": versions(*packages), "commit": commit(), "date": now}


def printed(command: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Run a command in the root folder; return the JSON object on the last line that the command prints.

    Args:
      settings: Arguments of `subprocess.run`, such as its environment.
    """
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, **settings)
    return json.loads(done.stdout.strip().splitlines()[-1])
