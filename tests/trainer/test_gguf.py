"""GGUF files beside exports: the converter is found, called and heard, and what it cannot take is refused first."""

import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_checkpoints
import tiny_runs
from command_lines import run_module
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from jaxrlhf.checkpoint.pretrained import convert
from jaxrlhf.config import Lora, Pretrained, Refusal, load, override
from jaxrlhf.trainer import saved_policy
from jaxrlhf.trainer.publishing.export import Export
from jaxrlhf.trainer.publishing.gguf import COMMANDS, find_converter

CONVERTER = """\
import pathlib, sys
model, _, out, _, kind = sys.argv[1:]
if not pathlib.Path(model, "config.json").is_file() or "bad" in model:
    sys.exit("INFO: reading\\nValueError: Model Bad is not supported")
if "unknown" in model:
    sys.exit("NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")
pathlib.Path(out).write_text(f"{kind} of {sorted(p.name for p in pathlib.Path(model).iterdir())[0]}")
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A checkpoint that exports in no time."""
    folder = tmp_path_factory.mktemp("gguf")
    convert(tiny_runs.write_policy(folder / "model"), folder / "converted")
    return folder / "converted"


@pytest.fixture
def converter(tmp_path):
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(CONVERTER)
    return script


def test_the_converter_is_given_the_export(converted, converter, tmp_path, capsys):
    file = tmp_path / "files" / "model.gguf"
    more = ("--gguf-type", "q8_0", "--gguf-converter", converter)
    run_module("export", converted, tmp_path / "out", "--gguf", file, *more)
    assert file.read_text() == "q8_0 of chat_template.jinja"
    assert f"wrote {file}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_module("export", converted, tmp_path / "bad", "--gguf", tmp_path / "no.gguf", *more)
    said = capsys.readouterr().err
    assert "ValueError: Model Bad is not supported. The export itself is complete" in said and said.count("\n") == 1
    assert (tmp_path / "bad" / "config.json").is_file() and not (tmp_path / "no.gguf").exists()
    with pytest.raises(SystemExit):
        run_module("export", converted, tmp_path / "unknown", "--gguf", tmp_path / "no.gguf", *more)
    assert "llama.cpp does not support this one. The export itself is complete" in capsys.readouterr().err


def test_a_converter_on_path_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in reversed(COMMANDS):  # the first name wins
        (tmp_path / name).touch(mode=0o755)
        assert find_converter(None) == [str(tmp_path / name)]
    assert find_converter(COMMANDS[1]) == [str(tmp_path / COMMANDS[1])]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gguf", "{tmp}/m.gguf"), "pip install 'jaxrlhf[to-gguf]', or pass --gguf-converter"),
        (("--gguf", "{tmp}/m.gguf", "--gguf-converter", "no.py"), "no.py is neither a command nor a Python file"),
        (("--gguf", "{tmp}/m.bin"), "does not end in .gguf; pass the name of a new file"),
        (("--gguf", "{tmp}/there.gguf"), "exists; choose another name"),
        (("--gguf-type", "f16"), "require a GGUF file; add --gguf FILE"),
    ],
)
def test_what_could_not_be_written_is_refused_first(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "there.gguf").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit):
        run_module("export", "run", tmp_path / "out", *(word.format(tmp=tmp_path) for word in words))
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_adapters_alone_are_no_gguf_file(tmp_path, monkeypatch):
    how = {"dtype": None, "average": False, "gguf": "m.gguf", "gguf_type": None, "gguf_converter": None}
    how |= {"push": None, "private": False, "overwrite": False}
    changes = {"cold_start": None, "actor.lora": Lora(rank=2), "model": Pretrained("org/base")}
    config = override(load(tiny_runs.__file__), changes)
    Export(tmp_path / "out", merge=True, **how).check(config)
    monkeypatch.setattr(saved_policy, "find_run", lambda run, step, reward_model: SimpleNamespace(adapted=True))
    with pytest.raises(Refusal, match="does not support the tokenizer of FromScratch"):  # before anything is trained
        Export(tmp_path / "out", merge=False, **how).check(load(tiny_runs.__file__))
    alone = Export(tmp_path / "out", merge=False, **how)
    for refuses in (lambda: alone.check(config), lambda: alone.write(tmp_path / "run")):
        with pytest.raises(Refusal, match="requires whole weights, but the run trains adapters; add --merge"):
            refuses()


def write_llama(directory):
    """A tiny Llama whose tokenizer falls back on bytes, as SentencePiece's do."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    ids = {word: number for number, word in enumerate(vocabulary)}
    made = Tokenizer(models.BPE(vocab=ids, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    model = tiny_checkpoints.build("llama", vocab_size=len(ids), bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tiny_checkpoints.write(directory, model)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_llama_cpps_own_converter_takes_an_export(tmp_path):
    gguf = pytest.importorskip("gguf", reason="pip install 'jaxrlhf[to-gguf]'")
    beside = os.path.dirname(sys.executable)
    if not any(shutil.which(name, path=f"{beside}:{os.environ['PATH']}") for name in COMMANDS):
        pytest.skip("no converter; pip install 'jaxrlhf[to-gguf]'")
    convert(write_llama(tmp_path / "model"), tmp_path / "converted")
    run_module("export", tmp_path / "converted", tmp_path / "out", "--gguf", tmp_path / "m.gguf", "--gguf-type", "f32")
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    assert read.get_field("general.architecture").contents() == "llama"
    assert read.get_field("tokenizer.ggml.tokens").contents()[-1] == "ab"
    assert "message.content" in read.get_field("tokenizer.chat_template").contents()
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {f"blk.{k}.ffn_up.weight": f"model.layers.{k}.mlp.up_proj.weight" for k in range(2)}
    for name, exported in names.items():
        np.testing.assert_array_equal(tensors[name], weights[exported])
