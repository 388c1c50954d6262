"""Checkpoints of a hub: what is downloaded, and one line that says what to do where nothing comes."""

import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_hub
from peft import LoraConfig
from tiny_checkpoints import build, write

from jaxrlhf import models
from jaxrlhf.config import Lora
from jaxrlhf.data.tokenizer import embedded_tokenizer, load_tokenizer
from jaxrlhf.models.huggingface import hub
from jaxrlhf.models.huggingface.peft import save_adapters
from jaxrlhf.models.lora.lora import adapter_shapes

MODEL = "org/model"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of several files, with a tokenizer and with files that nobody here reads."""
    directory = write(tmp_path_factory.mktemp("source"), build("qwen2"), max_shard_size="20KB")
    embedded_tokenizer().save_pretrained(directory)
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (directory / name).write_bytes(b"unread")
    return directory


@pytest.fixture
def contents(source, tmp_path, monkeypatch):
    """Contents of the hub of a test."""
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    contents = tiny_hub.Contents({MODEL: {"main": files}})
    server = tiny_hub.serve(contents)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    listen(monkeypatch, server.server_port)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub._download.cache_clear()
    yield contents
    server.shutdown()
    thread.join()
    server.server_close()
    hub._download.cache_clear()


def listen(monkeypatch, port):
    """The hub is at a port, as HF_ENDPOINT says before the library is imported."""
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def gone(monkeypatch):
    """From now on nothing listens where the hub was."""
    hub._download.cache_clear()
    listen(monkeypatch, port=9)


def load(name):
    return models.load_params(name, models.read_config(name), "lm")


def same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def refuses(*words, read=load, name=MODEL):
    """One line with all of these words."""
    with pytest.raises(ValueError) as error:
        read(name)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_what_is_asked_for_is_downloaded_once(contents, source):
    beside = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    beside |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert models.read_config(MODEL) == models.read_config(source)
    assert contents.sent() == beside
    assert load_tokenizer(str(models.resolve(MODEL))).get_vocab() == load_tokenizer(str(source)).get_vocab()
    same(load(MODEL), load(source))
    shards = {file.name for file in source.glob("model-*.safetensors")}
    assert len(shards) > 1 and contents.sent() == beside | shards
    hub._download.cache_clear()  # as another process would
    contents.asked.clear()
    same(load(MODEL), load(source))
    assert contents.asked and not contents.sent()


def test_a_branch_a_tag_or_a_commit(contents, source):
    before = contents.repositories[MODEL]["main"]
    after = before | {"generation_config.json": b'{"eos_token_id": 7}'}
    contents.repositories[MODEL] = {"main": after, "feature/x": before, "v1": before}
    commit = tiny_hub.commit_of(after)
    for revision, files in (("", after), ("@feature/x", before), ("@v1", before), (f"@{commit}", after)):
        found = models.resolve(MODEL + revision)
        assert (found / "generation_config.json").read_bytes() == files["generation_config.json"]
    same(load(f"{MODEL}@v1"), load(source))
    refuses("hub repository 'org/model' has no branch, tag or commit 'v2'", name=f"{MODEL}@v2")


@pytest.mark.parametrize("revision", [None, "v1"])
def test_adapters_say_of_which_revision_their_model_is(source, tmp_path, revision):
    config, lora = models.read_config(source), Lora(rank=2, alpha=4.0)
    adapters = jax.tree.map(lambda shape: np.zeros(shape.shape, np.float32), adapter_shapes(config, "lm", lora))
    model = MODEL if revision is None else f"{MODEL}@{revision}"
    save_adapters(adapters, config, "lm", lora, tmp_path, model=model)
    fields = LoraConfig.from_pretrained(tmp_path)
    assert (fields.base_model_name_or_path, fields.revision) == (MODEL, revision)


def test_a_directory_may_have_a_name_like_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "model@v1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.without_revision("model@v1") == ("model@v1", None)
    assert models.resolve("model@v1") == Path("model@v1")


def test_a_repository_that_is_not_there(contents):
    refuses("no local directory 'org/none'", "check the spelling", "404", name="org/none")


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_says_where_to_ask(contents, source, monkeypatch, status):
    contents.gated[MODEL] = status
    refuses("'org/model' is gated", "/org/model", "hf auth login")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert models.read_config(MODEL) == models.read_config(source)


@pytest.mark.parametrize(
    "missing, words",
    [("config.json", "has no config.json"), ("model-00002-of-", "is missing, but model.safetensors.index.json lists")],
)
def test_a_repository_without_one_of_its_files(contents, missing, words):
    branch = contents.repositories[MODEL]
    branch["main"] = {name: file for name, file in branch["main"].items() if not name.startswith(missing)}
    refuses("models--org--model", missing, words)


def test_a_download_that_breaks_off_is_taken_up_again(contents, source):
    torn = next(file.name for file in source.glob("model-00002-of-*"))
    contents.torn.add(torn)
    refuses("the download of 'org/model' from the hub failed", torn, "start again")
    contents.torn.clear()
    contents.asked.clear()
    same(load(MODEL), load(source))
    assert torn in contents.sent() and "config.json" not in contents.sent()


def test_without_the_hub_there_is_its_cache(contents, source, monkeypatch):
    load(MODEL)
    gone(monkeypatch)
    same(load(MODEL), load(source))
    refuses("no local directory 'org/none'", "check the spelling, the network or the login", name="org/none")


def test_weights_that_were_never_downloaded_are_not_in_the_cache(contents, monkeypatch):
    models.read_config(MODEL)
    gone(monkeypatch)
    assert models.read_config(MODEL).family == "qwen2"
    refuses("no local directory 'org/model'", "check the spelling, the network or the login")


def test_a_folder_of_a_run_is_no_checkpoint_to_load(tmp_path):
    step = tmp_path / "checkpoints" / "step_60"
    step.mkdir(parents=True)
    (tmp_path / "lock").touch()
    for folder in (tmp_path, step):
        with pytest.raises(ValueError, match=f"^{folder} belongs to a run .* jaxrlhf.export {tmp_path} DIRECTORY"):
            hub.resolve(folder)
    for model in (tmp_path / "exported", tmp_path / "checkpoints" / "llama"):
        model.mkdir()
        assert hub.resolve(model) == model
