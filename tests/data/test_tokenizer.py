"""The embedded tokenizer, and errors of other tokenizers."""

import json
import re

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxrlhf.config import Arithmetic, FromScratch, Lora, Pretrained, PromptFile, Refusal
from jaxrlhf.data.arithmetic import LEVELS, arithmetic_records
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import decoder, embedded_tokenizer, load_tokenizer, misread
from jaxrlhf.models import model_config
from jaxrlhf.models.huggingface.save import save_description
from jaxrlhf.trainer import saved_policy

TEXTS = [
    "Mia has 12 marbles.\nShe finds 5 more.",
    "  two  spaces\tand a tab \r\n",
    "Grüße, 你好, 🙂 — naïve\u00a0café №٣",
    "###### 3.14*-2=????",
    "".join(map(chr, range(128))),
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    embedded_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_is_small_and_its_marks_differ(tokenizer):
    assert len(tokenizer) <= 512
    marks = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert len(marks) == 3 and None not in marks


@pytest.mark.parametrize("difficulty", sorted(LEVELS))
@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_one_token_a_word_and_a_digit(tokenizer, difficulty, split):
    for record in arithmetic_records(difficulty=difficulty, problems=60, seed=7, split=split):
        for text in (record["question"], record["solution"]):
            tokens = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
            assert "".join(tokens) == text
            assert tokens == re.findall(r" ?[A-Za-z]+|#+|[^A-Za-z#]", text)


def test_building_is_deterministic(saved, tmp_path):
    embedded_tokenizer().save_pretrained(tmp_path)
    files = sorted(file.name for file in saved.iterdir())
    assert files == sorted(file.name for file in tmp_path.iterdir())
    for name in files:
        assert (saved / name).read_bytes() == (tmp_path / name).read_bytes()


def test_saved_and_loaded_it_is_the_same(tokenizer, saved):
    for other in (AutoTokenizer.from_pretrained(saved), load_tokenizer(str(saved)), load_tokenizer(None)):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert [other.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
        assert other.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(CHAT, tokenize=False)
        assert (other.eos_token, other.bos_token, other.pad_token) == ("<|eos|>", "<|bos|>", "<|pad|>")


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>Be brief.<|user|>1+1?<|assistant|>2<|eos|><|user|>2+2?<|assistant|>"
    ids = tokenizer.encode(text)
    marks = [token for token in tokenizer.convert_ids_to_tokens(ids) if token.startswith("<|")]
    assert marks == re.findall(r"<\|\w+\|>", text)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_a_model_beside_it_does_not_change_its_ids(tokenizer, saved, tmp_path, model_type):
    embedded_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert load_tokenizer(str(tmp_path)).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize(
    ("model_type", "word"), [("qwen2", "makes a Qwen2Tokenizer with other ids"), ("qwen3_moe", None), ("llama", None)]
)
def test_a_tokenizer_that_auto_tokenizer_loads_wrongly_is_reported(tokenizer, tmp_path, model_type, word):
    embedded_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    same = AutoTokenizer.from_pretrained(tmp_path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    note = misread(tmp_path)
    assert same == (note is None) == (word is None)
    if note is not None:
        assert word in note and "\n" not in note
        assert f"PreTrainedTokenizerFast.from_pretrained({str(tmp_path)!r})" in note
        advised = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
        assert advised.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def edit_config(directory, **changes):
    file = directory / "tokenizer_config.json"
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def test_without_eos_it_is_refused(refused, tmp_path):
    embedded_tokenizer().save_pretrained(tmp_path)
    edit_config(tmp_path, eos_token=None)
    with refused():
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_ends_prompts_is_refused(refused):
    tokenizer = embedded_tokenizer()
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    data, how = Arithmetic(train_problems=1), {"split": "train", "max_prompt_tokens": 99}
    assert tokenizer.eos_token_id not in load_problems(data, tokenizer, **how).problems[0].prompt_tokens
    tokenizer.chat_template = None
    with refused():
        load_problems(data, tokenizer, **how)


def test_a_tokenizer_without_a_pad_token_is_accepted(tmp_path):
    embedded_tokenizer().save_pretrained(tmp_path)
    edit_config(tmp_path, pad_token=None)
    assert load_tokenizer(str(tmp_path)).pad_token is None


def test_a_class_that_ignores_the_file_is_refused(refused, tmp_path):
    embedded_tokenizer().save_pretrained(tmp_path)
    edit_config(tmp_path, tokenizer_class="Qwen2Tokenizer")
    with refused():
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("call", [{"max_length": 8}, {"max_length": 512, "padding": "max_length"}, {"padding": True}])
def test_saved_padding_and_truncation_are_ignored(tokenizer, tmp_path, call):
    used = embedded_tokenizer()
    used([TEXTS[0], TEXTS[3]], truncation="max_length" in call, **call)
    used.save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "tokenizer.json").read_text())
    assert kept["padding"] or kept["truncation"]
    loaded = load_tokenizer(str(tmp_path))
    assert [loaded.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1" * 600}))
    data = PromptFile(str(tmp_path / "p.jsonl"), answer_key=None)
    (problem,) = load_problems(data, loaded, split="train", max_prompt_tokens=999).problems
    assert len(problem.prompt_tokens) == 602


def unigram(**settings):
    """A tokenizer of single characters, with words at a `▁`."""
    letters = [*sorted({*"".join(map(chr, range(33, 127)))}), "\n", "▁"]
    kept = Tokenizer(models.Unigram([("<unk>", 0.0), *((letter, -5.0) for letter in letters)], 0, byte_fallback=False))
    kept.pre_tokenizer = pre_tokenizers.Metaspace()
    kept.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=kept, eos_token="</s>", unk_token="<unk>", **settings)


@pytest.mark.parametrize("clean", [True, False, None])
@pytest.mark.parametrize("make", [unigram, lambda **_: embedded_tokenizer()])
def test_the_text_of_tokens_keeps_its_spaces(tmp_path, make, clean):
    make().save_pretrained(tmp_path)
    edit_config(tmp_path, clean_up_tokenization_spaces=clean)
    tokenizer = load_tokenizer(str(tmp_path))
    decode = decoder(tokenizer)
    for text in ("x != y", "the word 'social' , is", "do n't", "a ? b ! c .", "if a :\n b"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert decode(ids) == tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path / "export")
    assert load_tokenizer(str(tmp_path / "export")).decode(ids) == text


def test_a_class_with_other_ids_for_runs_of_spaces_is_refused(tmp_path):
    """Words and digits have the same ids; runs of line breaks and tabs have other ids."""
    pieces = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("ĉ", "ĉ")]
    kept = Tokenizer(
        models.BPE(vocab=pieces | {"".join(pair): 256 + n for n, pair in enumerate(merges)}, merges=merges)
    )
    kept.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s|\S+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    kept.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=kept, eos_token="<eos>").save_pretrained(tmp_path)
    text = "lines\n\n\t\ttabs"
    assert load_tokenizer(str(tmp_path)).encode(text) == kept.encode(text).ids
    edit_config(tmp_path, tokenizer_class="Qwen2Tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path).encode("Tom has 12") == kept.encode("Tom has 12").ids
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) != kept.encode(text).ids
    with pytest.raises(Refusal, match=r"Qwen2Tokenizer, loaded from .*gives other ids"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_loses_text_is_refused(refused, tmp_path):
    lossy = Tokenizer(
        models.BPE(vocab={s: n for n, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    lossy.normalizer = normalizers.Lowercase()
    lossy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    lossy.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=lossy, eos_token="<eos>").save_pretrained(tmp_path)
    with refused():
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", [None, "{", "{}", '{"added_tokens": [], "model": {"type": "Later"}}'])
def test_nothing_to_load(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="no tokenizer could be loaded from") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_missing_directory(refused, tmp_path):
    with refused():
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_template_with_a_date_writes_a_fixed_date(tmp_path):
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b') }}, {{ strftime_now(\"%Y\") }}: {{ messages[0].content }}"
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1?"}')
    data = PromptFile(str(tmp_path / "p.jsonl"), answer_key=None)
    loaded = load_problems(data, tokenizer, split="train", max_prompt_tokens=99)
    assert loaded.problems[0].prompt == "26 Jul, 2024: 1+1?"


def test_code_of_a_tokenizer_is_not_run(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "vocab.json"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnTokenizer: pass\n")
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(Refusal, match="is Python code, which is not run here"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_saved_tokenizer_names_no_code_of_its_source(tmp_path, monkeypatch):
    places = {name: tmp_path / name / "tokenizer_config.json" for name in ("source", "plain", "model", "adapters")}
    embedded_tokenizer().save_pretrained(tmp_path / "source")
    named = json.loads(places["source"].read_text()) | {"auto_map": {"AutoProcessor": "own.Processor"}}
    places["source"].write_text(json.dumps(named))
    tokenizer = load_tokenizer(str(tmp_path / "source"))
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "adapters").mkdir()
    monkeypatch.setattr(saved_policy, "save_adapters", lambda *given, **_: (given[4] / saved_policy.WEIGHTS).touch())
    adapted = saved_policy.AdaptedRun(Lora(), Pretrained("base"), seed=0, cold_start=None)
    how = {"tokenizer": tokenizer, "dtype": "float32", "progress": lambda done, total: None}
    adapted.save({}, None, "lm", tmp_path / "adapters", **how)
    save_description(model_config(FromScratch(), tokenizer), tmp_path / "model", tokenizer=tokenizer)
    written = {name: json.loads(file.read_text()) for name, file in places.items()}
    assert written["plain"].pop("auto_map")  # as transformers writes it
    assert written["adapters"] == written["model"] == written["plain"]
