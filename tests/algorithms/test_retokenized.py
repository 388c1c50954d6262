"""Responses in the tokens of another tokenizer: spans against a naive search, text kept, and sums over spans."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrlhf.batch import Problem
from jaxrlhf.config import load_module
from jaxrlhf.data.tokenizer import embedded_tokenizer

by_spans = load_module("span_distillation")
NO_SPAN, Retokenizer = by_spans.NO_SPAN, by_spans.Retokenizer
TEXTS = ["12-3=9\n#### 9", "Tom has 123 pears.", "é12日本34", "##### ", "1", ""]


def pairs_of_digits(folder: Path | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, pairs of digits, and pairs of `#`; its chat template is another one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "0123456789" for b in "0123456789"] + [("#", "#")]
    names = ["<end>", "<ask>", "<say>", *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        additional_special_tokens=["<ask>", "<say>"],
        chat_template="{% for m in messages %}{{ '<ask>' if m.role == 'user' else '<say>' }}{{ m.content }}"
        "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<say>{% endif %}",
        clean_up_tokenization_spaces=False,
    )
    if folder is not None:
        made.save_pretrained(str(folder))
    return made


POLICY, OTHER = embedded_tokenizer(), pairs_of_digits()


def bytes_of(tokenizer, ids) -> bytes:
    """The bytes that tokens are, each by itself, as byte-level tokenizers spell them."""
    spelled = dict(zip(bytes_to_unicode().values(), bytes_to_unicode().keys(), strict=True))
    return b"".join(bytes(spelled[letter] for letter in tokenizer.convert_ids_to_tokens(int(one))) for one in ids)


def bytes_to_unicode() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("finished", [True, False])
def test_spans_are_the_shortest_texts_that_both_tokenizers_cut(text, finished):
    ids = POLICY.encode(text, add_special_tokens=False) + [POLICY.eos_token_id] * finished
    own = Retokenizer(POLICY, OTHER).response(ids, finished=finished)
    assert own.tokens == OTHER.encode(text, add_special_tokens=False) + [OTHER.eos_token_id] * finished
    said, theirs = ids[: len(ids) - finished], own.tokens[: len(own.tokens) - finished]
    whole = text.encode()
    characters = {len(text[:n].encode()) for n in range(len(text) + 1)}

    def cuts(tokenizer, tokens) -> set[int]:
        return {len(bytes_of(tokenizer, tokens[:n])) for n in range(len(tokens) + 1)} & characters

    places = sorted(cuts(POLICY, said) & cuts(OTHER, theirs))
    assert places[0] == 0 and places[-1] == len(whole)
    assert own.span_S.max(initial=NO_SPAN) + 1 == len(places) - 1 + finished
    for span, (start, end) in enumerate(itertools.pairwise(places)):
        for tokenizer, tokens, spans in ((POLICY, said, own.span_S), (OTHER, theirs, own.span_T)):
            members = np.flatnonzero(spans == span)
            assert bytes_of(tokenizer, [tokens[n] for n in members]) == whole[start:end]
    if finished:
        assert own.span_S[-1] == own.span_T[-1] == len(places) - 1


def test_sums_are_over_the_tokens_of_a_span_and_what_is_cut_is_none():
    ids = [*POLICY.encode("123=45", add_special_tokens=False), POLICY.eos_token_id]
    own = Retokenizer(POLICY, OTHER).response(ids, finished=True)
    assert OTHER.convert_ids_to_tokens(own.tokens) == ["12", "3", "=", "45", "<end>"]
    logp = np.array([-1.0, -2.0, -4.0, -8.0, -16.0])
    span, sums = own.sums(logp)
    assert span.tolist() == [0, 0, 1, 2, 3, 3, 4]
    assert sums.tolist() == [-1, -1, -2, -4, -8, -8, -16]
    span, sums = own.sums(logp[:3])  # the row ends before "45"
    assert span.tolist() == [0, 0, 1, 2, NO_SPAN, NO_SPAN, NO_SPAN]
    assert sums.tolist() == [-1, -1, -2, -4, 0, 0, 0]


def test_half_a_character_and_what_follows_are_in_no_span():
    ids = POLICY.encode("1日", add_special_tokens=False)[:-1]  # two bytes of three
    for after in ([], POLICY.encode("2", add_special_tokens=False), [POLICY.eos_token_id]):
        own = Retokenizer(POLICY, OTHER).response([*ids, *after], finished=bool(after))
        assert OTHER.convert_ids_to_tokens(own.tokens) == ["1"]
        assert own.span_S.tolist() == [0, *[NO_SPAN] * (2 + len(after))]


def test_prompts_are_in_the_other_chat_template():
    problem = Problem(0, "<|user|>12<|assistant|>", (1,), messages=({"role": "user", "content": "12"},))
    assert OTHER.convert_ids_to_tokens(Retokenizer(POLICY, OTHER).prompt(problem)) == ["<ask>", "12", "<say>"]
