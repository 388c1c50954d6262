"""Tokenizers of GGUF files: the ids of the file, special tokens whole, and text cut as the model learned it."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf_files import letters

from jaxrlhf.models.huggingface.gguf_header import Header, _ends
from jaxrlhf.models.huggingface.gguf_tokenizer import doubt_of, read_tokenizer

BYTES = letters()
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def of_bytes(
    rules, *, control=("<pad>", "<bos>", "<eos>"), further=(), merges=("a b",), architecture="qwen2", **values
):
    """Header of a byte-level vocabulary: control tokens, the 256 bytes, what merges make, and further tokens."""
    merged = ["".join(merge.split()) for merge in merges]
    tokens = [*control, *BYTES, *merged, *further]
    kinds = [CONTROL] * len(control) + [NORMAL] * (len(tokens) - len(control))
    said = {"general.architecture": architecture, "tokenizer.ggml.model": "gpt2"}
    said |= {} if rules is None else {"tokenizer.ggml.pre": rules}
    said |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    said |= {f"tokenizer.{name}": value for name, value in values.items()}
    return Header(Path("m.gguf"), said, {"tokens": tokens, "token_type": kinds, "merges": list(merges)}, {})


def of_pieces(architecture="llama", special=("<unk>", "<s>", "</s>"), **values):
    """Header of a SentencePiece vocabulary that falls back on bytes."""
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "ab"]
    scores = [0.0] * 259 + [-1000.0, -1001.0, -1.0, -1002.0, -2.0]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5]
    said = {"general.architecture": architecture, "tokenizer.ggml.model": "llama"}
    said |= {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("unknown", "bos", "eos"))}
    said |= {f"tokenizer.{name}": value for name, value in values.items()}
    return Header(Path("m.gguf"), said, {"tokens": tokens, "scores": scores, "token_type": kinds}, {})


@pytest.mark.parametrize("rules", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_ids_are_the_files_and_no_others(rules):
    header = of_bytes(rules, **{"ggml.add_bos_token": False})
    tokenizer, tokens = read_tokenizer(header), header.tokens["tokens"]
    assert len(tokenizer) == len(tokens)
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert tokenizer.encode("xab<eos>") == [3 + ord("x"), len(tokens) - 1, 2]
    assert tokenizer.decode(tokenizer.encode("é, 1")) == "é, 1"
    assert max(tokenizer.encode("<|endoftext|><s></s>")) < len(tokens)


def test_control_tokens_beyond_ascii_are_whole():
    control = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜end▁of▁sentence｜>")
    header = of_bytes("deepseek-r1-qwen", control=control, **{"ggml.bos_token_id": 0, "ggml.add_bos_token": False})
    tokenizer = read_tokenizer(header)
    assert tokenizer.encode("<｜User｜>x") == [1, 3 + ord("x")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 2, 260)


@pytest.mark.parametrize(
    "rules, values, first",
    [("llama-bpe", {}, 1), ("llama-bpe", {"ggml.add_bos_token": False}, 3 + ord("x")), ("qwen2", {}, 3 + ord("x"))],
)
def test_llama_3_begins_with_bos_unless_the_file_says_no(rules, values, first):
    assert read_tokenizer(of_bytes(rules, **values)).encode("x")[0] == first


@pytest.mark.parametrize("rules, whole", [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_words_that_are_tokens_are_taken_whole_where_the_model_learned_so(rules, whole):
    header = of_bytes(rules, further=("xyz",), **{"ggml.add_bos_token": False})
    parts = [3 + ord(letter) for letter in "xyz"]
    assert read_tokenizer(header).encode("xyz") == ([260] if whole else parts)


def test_qwen_normalises_and_others_do_not():
    apart = "e\u0301"
    whole = [3 + byte for byte in "é".encode()]
    said = {"ggml.add_bos_token": False}
    assert read_tokenizer(of_bytes("qwen2", **said)).encode(apart) == whole
    assert read_tokenizer(of_bytes("gpt-2", **said)).encode(apart) == [3 + byte for byte in apart.encode()]


def test_line_breaks_before_a_digit_stay_together_in_smollm():
    breaks = b"\n\n"
    both = "".join(BYTES[byte] for byte in breaks)
    header = of_bytes("smollm", merges=(" ".join(both),), **{"ggml.add_bos_token": False})
    assert read_tokenizer(header).convert_ids_to_tokens(read_tokenizer(header).encode("\n\n12")) == [both, "1", "2"]


def test_sentencepiece_vocabularies():
    tokenizer = read_tokenizer(of_pieces())
    assert tokenizer.encode("a") == [1, 261] and tokenizer.encode("é", add_special_tokens=False)[-2:] == [198, 172]
    assert len(tokenizer) == 264 and tokenizer.decode([261]) == "a"
    plain = read_tokenizer(of_pieces(**{"ggml.add_bos_token": False, "ggml.add_space_prefix": False}))
    assert plain.encode("a") == [260] and plain.decode([260]) == "a"
    other = read_tokenizer(of_pieces(special=("<unk>", "<|startoftext|>", "<|endoftext|>")))
    assert other.encode("<|endoftext|>a")[:2] == [1, 2] and len(other) == 264
    gemma = read_tokenizer(of_pieces("gemma2", special=("<pad>", "<eos>", "<bos>"), **{"ggml.add_bos_token": False}))
    assert len(gemma) == 264 and gemma.encode("a") == [260]


def test_what_a_template_opens_turns_with_is_whole_though_the_file_calls_it_normal():
    template = "{% for message in messages %}<start_of_turn>{{ message.content }}<end_of_turn>{% endfor %}"
    header = of_pieces("gemma3", **{"ggml.add_bos_token": False, "chat_template": template})
    tokens, kinds = [*header.tokens["tokens"], "<start_of_turn>"], [*header.tokens["token_type"], NORMAL]
    scores = [*header.tokens["scores"], -3.0]
    changed = replace(header, tokens={"tokens": tokens, "token_type": kinds, "scores": scores})
    assert read_tokenizer(changed).encode("<start_of_turn>a") == [264, 260]


def test_rules_that_are_not_said_or_not_known_are_doubted():
    assert "does not name its pre-tokenizer" in doubt_of(of_bytes(None))
    assert "unknown pre-tokenizer 'default'" in doubt_of(of_bytes("default"))
    for rules in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "pixtral"):
        assert doubt_of(of_bytes(rules)) is None
    assert doubt_of(of_pieces()) is None


def test_ends_of_turns_are_found_by_their_text():
    turn = of_bytes("gpt-2", control=("<pad>", "<bos>", "<eos>", "<end_of_turn>"))
    assert _ends(turn) == [2, 3]
    said = of_bytes("gpt-2", **{"ggml.eot_token_id": 0, "ggml.eos_token_ids": [2, 1]})
    assert _ends(said) == [2, 0, 1]
