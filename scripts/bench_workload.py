"""The workloads of the benchmarks: checkpoints, prompts, reward, and what is measured beside seconds.

Other frameworks run the same ones (`bench_peers.py`), so nothing of JAX is imported here at the top.
Word `t<i>` is token i. In the preset `tail` the end of a response has probability 1/64 at every step, by the
weights themselves; in the others responses run to their limit.
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

END = 0
PAD = 1
END_PROBABILITY = 1 / 64
"""Of a preset that ends, at every step of a response."""
SHORTEST_PROMPT = 16
"""Tokens, in a preset that ends."""


@dataclass(frozen=True)
class Preset:
    """A Qwen2-shaped decoder with random weights.

    Attributes:
      ends: Responses end by themselves.
      positions: Tokens of the longest sequence.
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
        """Weights that every token is multiplied with, but for the head."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * self.heads * head_dim + 2 * self.hidden * self.kv_heads * head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        """Weights that a token is multiplied with for its logits."""
        return self.vocab * self.hidden


PRESETS = {
    "tiny": Preset(64, 2, 4, 2, 128, 512),
    "small": Preset(256, 8, 8, 4, 1024, 8192),
    "tail": Preset(256, 8, 8, 4, 1024, 8192, ends=True),
    "long": Preset(256, 8, 8, 4, 1024, 8192, positions=131_072),
    "qwen0p4b": Preset(896, 24, 14, 2, 4864, 32768, tied=True),
}


@dataclass(frozen=True)
class Workload:
    """One step's work.

    Attributes:
      prompt_tokens: Of every prompt; in a preset that ends, 16 up to this many.
      new_tokens: Of every response; in a preset that ends, at most.
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
    """Of one forward pass: products with weights, causal attention, and the head where a token is read."""
    head_dim = preset.hidden // preset.heads
    attention = preset.layers * 4 * preset.heads * head_dim * length * (length + 1) / 2
    return sequences * (2 * length * preset.matmul_parameters + attention + 2 * read * preset.head_parameters)


WORKLOADS = {
    "fixed": Workload(),
    "fixed512": Workload(new_tokens=512),
    "longtail": Workload("tail", 16, 8, 128, 384),
    "ppo": Workload(prompts=64, responses=1, algorithm="ppo"),
    "big": Workload("qwen0p4b", 2, 4, 64, 64),
}


def add_flags(
    parser: argparse.ArgumentParser, *, workload: str = "fixed", choices: Mapping[str, Workload] = WORKLOADS
) -> None:
    """Add flags that choose a workload, change its sizes, and say where checkpoints are."""
    parser.add_argument("--workload", choices=choices, default=workload)
    parser.add_argument("--preset", choices=PRESETS, help="of the model; the workload's if not given")
    for name, what in (
        ("prompts", "of a step"),
        ("responses", "to a prompt"),
        ("prompt-tokens", "of a prompt"),
        ("new-tokens", "of a response"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{what}; the workload's if not given")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")


def workload_of(flags: argparse.Namespace, choices: Mapping[str, Workload] = WORKLOADS) -> Workload:
    """The workload that flags choose."""
    sizes = {name: getattr(flags, name) for name in ("preset", "prompts", "responses", "prompt_tokens", "new_tokens")}
    return replace(choices[flags.workload], **{name: size for name, size in sizes.items() if size is not None})


def prompts(workload: Workload, *, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Distinct prompts as token ids."""
    draw, preset = random.Random(seed), PRESETS[workload.preset]
    shortest = SHORTEST_PROMPT if preset.ends else workload.prompt_tokens
    return [
        tuple(draw.randrange(2, preset.vocab) for _ in range(draw.randint(shortest, workload.prompt_tokens)))
        for _ in range(count)
    ]


def even_share(prompt: str, response: str, answer: str | None, record: Any) -> float:
    """The reward: share of the response's tokens whose id is even."""
    ids = [int(word) for word in re.findall(r"\bt(\d+)\b", response)]
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))


def checkpoint(preset: str, folder: Path) -> Path:
    """A Hugging Face checkpoint of the preset with its tokenizer, written once; returns its place."""
    place, unfinished = folder / preset, folder / f"{preset}.unfinished"
    if not place.exists():
        _write_checkpoint(PRESETS[preset], unfinished)
        unfinished.rename(place)
    return place


def checkpoint_of_bytes(preset: str, folder: Path) -> Path:
    """The same checkpoint with a tokenizer that can write any text: ids 2 to 257 are bytes, others are ` t<i>`."""
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
    # Ids past the vocabulary can never be drawn, so that in every framework responses run to their limit.
    tokenizer(preset, outside=not preset.ends).save_pretrained(str(place))


def _end_at_random(tensors: dict[str, Any], preset: Preset) -> None:
    """Have a coordinate of the residual stream that stays 1 decide the end's logit.

    The final norm divides it by the stream's root mean square. Layers are made to add little, so that it is the
    embedding's in every context; else the end would be as likely as what came before it says.
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
    # Other logits are normal with the variance of |hidden|^2 x 0.02^2; the sum of their exponentials is their number
    # times exp(variance / 2).
    normal = stream[:, 1:] * scale
    variance = float(np.mean(np.sum(np.square(normal), axis=1))) * 0.02**2
    odds = END_PROBABILITY / (1 - END_PROBABILITY)
    head[END, 0] = (np.log(odds * (preset.vocab - 1)) + variance / 2) / scale


def tokenizer(preset: Preset, *, outside: bool) -> Any:
    """Word `t<i>` is token i; `<eos>` and `<pad>` lie past the vocabulary, or are ids 0 and 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end, pad = (preset.vocab, preset.vocab + 1) if outside else (END, PAD)
    words = {f"t{index}": index for index in range(preset.vocab) if outside or index not in (END, PAD)}
    model = models.WordLevel({**words, "<eos>": end, "<pad>": pad}, unk_token="t2")
    fast = Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # A special token is cut out of words too, so the unknown one (t2, of t27) must not be declared here.
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>", pad_token="<pad>", padding_side="left")


class Watching(ABC):
    """Context that looks at something in a thread while the block runs, every `period_s`."""

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
        """Note what is there now."""


class Memory(Watching):
    """Peak resident memory of this process and its children while the block runs, in MiB.

    The system keeps this process's own peak; children are looked at now and then, because every look takes a core
    from the work: 20 a second made generation 5 to 18 % slower on two cores.
    """

    def __init__(self) -> None:
        super().__init__(period_s=0.5)
        self.peak_mb = 0.0

    def look(self) -> None:
        children = sum(map(_resident_mb, _children(os.getpid())))
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.peak_mb = max(self.peak_mb, own + children)


class Held(Watching):
    """Memory of this process while the block runs, over what it was before.

    Attributes:
      peaks: Most bytes of its own, and of mapped files.
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
    # What it shares with others is counted in parts, so that a forked child is not its parent twice.
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of packages."""
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def processor() -> str:
    """Name of the processor, or its kind where the system says no more, and cores."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.machine())
    if name == "AMD EPYC":  # virtual machines call Zen 4 and Zen 5 so
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit that is measured."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def about(*packages: str) -> dict[str, Any]:
    """Machine, versions, commit and date of a measurement."""
    now = time.strftime("%Y-%m-%d")
    return {"processor": processor(), "versions": versions(*packages), "commit": commit(), "date": now}


def printed(command: Sequence[str], **settings: Any) -> dict[str, Any]:
    """The JSON object on the last line that a command prints.

    Args:
      settings: Arguments of `subprocess.run`, such as its environment and folder.
    """
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **settings)
    return json.loads(done.stdout.strip().splitlines()[-1])
