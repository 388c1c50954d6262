"""Messages of records: learned parts of answers, ends of prompts, and calls, compared with TRL and the server."""

import pytest
from chat_families import FAMILIES, tokenizer_of
from chat_records import (
    CALLED,
    CALLED_ALONE,
    FLOW,
    FOUR,
    RESULT,
    SKY,
    THOUGHT,
    TURNS,
    call,
    load,
    said,
    solution,
    write,
)
from trl.data_utils import apply_chat_template, maybe_extract_prompt

from jaxrlhf.config import Generated, PairFile, PromptFile, Refusal
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.data.tokenizer import embedded_tokenizer

SEEN_BY_ALL = ("qwen2.5", "qwen3", "qwen3.5", "llama 3.1", "gemma 4", "glm 4.5", "gpt-oss", "lfm2", "mistral")
"""Families whose templates write calls after the opening of the assistant's turn."""

SILENT = ("llama 3.1", "mistral")
"""Families whose templates drop the words of a message with calls."""


def of_trl(tokenizer, prompt, completion):
    return apply_chat_template({"prompt": prompt, "completion": completion}, tokenizer)["completion"]


# Solutions


@pytest.mark.parametrize("family", SEEN_BY_ALL)
@pytest.mark.parametrize("key", ["completion", "messages"])
def test_a_last_message_with_calls_is_learned_as_the_template_writes_it(tmp_path, family, key):
    tokenizer, called = tokenizer_of(family), CALLED_ALONE if family in SILENT else CALLED
    record = {"prompt": [SKY], "completion": [called]} if key == "completion" else {"messages": [SKY, called]}
    text, _ = solution(tokenizer, tmp_path / "a.jsonl", key=key, **record)
    right = of_trl(tokenizer, [SKY], [called])
    assert text.removesuffix(tokenizer.eos_token) == right.rstrip().removesuffix(tokenizer.eos_token)
    assert "add" in text.replace("I add.", "")


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "glm 4.5", "gpt-oss"])
@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_learned(tmp_path, family, name):
    tokenizer = tokenizer_of(family)
    thought = said("assistant", "4") | {name: "two and two"}
    text, _ = solution(tokenizer, tmp_path / "a.jsonl", prompt=[SKY], completion=[thought])
    right = of_trl(tokenizer, [SKY], [THOUGHT | {"thinking": "two and two"}])
    assert text.removesuffix(tokenizer.eos_token) == right.rstrip().removesuffix(tokenizer.eos_token)
    assert "two and two" in text


@pytest.mark.parametrize(
    ("family", "message"),
    [("qwen2.5", THOUGHT), ("gemma 3", CALLED), ("phi 3.5", CALLED), ("llama 3.1", CALLED), ("mistral", CALLED)],
)
def test_a_solution_that_the_template_shortens_is_refused(refused, tmp_path, family, message):
    path = write(tmp_path / "a.jsonl", {"messages": [SKY, FOUR]}, {"messages": [SKY, message]})
    with refused():
        load(tokenizer_of(family), PromptFile(path, answer_key=None, solution_key="messages"))


@pytest.mark.parametrize(
    ("family", "completion", "learned"),
    [
        ("qwen2.5", TURNS, ["It is 4.<|im_end|>", "Yes.<|im_end|>"]),
        ("llama 3.1", TURNS, ["It is 4.<|eot_id|>", "Yes.<|eot_id|>"]),
        ("mistral", TURNS, ["It is 4.</s>", "Yes.</s>"]),
        (
            "qwen3",
            FLOW,
            [
                'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
                "<think>\n\n</think>\n\nIt is 4.<|im_end|>",
            ],
        ),
        (
            "mistral",
            [CALLED_ALONE, RESULT, FOUR],
            ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>', "It is 4.</s>"],
        ),
    ],
)
def test_a_completion_of_several_messages_is_one_solution(tmp_path, family, completion, learned):
    """All messages follow the prompt, as in TRL; the assistant's messages and their ends of turn are imitated."""
    tokenizer = tokenizer_of(family)
    text, parts = solution(tokenizer, tmp_path / "a.jsonl", prompt=[SKY], completion=completion)
    assert text == of_trl(tokenizer, [SKY], completion).rstrip()
    assert parts == learned


def test_the_embedded_template_writes_several_turns(tmp_path):
    tokenizer = embedded_tokenizer()
    text, learned = solution(tokenizer, tmp_path / "a.jsonl", prompt="sky?", completion=TURNS)
    assert text == "It is 4.<|eos|><|user|>sure?<|assistant|>Yes.<|eos|>"
    assert learned == ["It is 4.<|eos|>", "Yes.<|eos|>"]


def test_a_single_message_is_learned_as_its_text(tmp_path):
    written = {
        "embedded": "It is 2.<|eos|>",
        "qwen3": "<think>\n\n</think>\n\nIt is 2.<|im_end|>",
        "phi 3.5": "It is 2.<|end|>",
    }
    for family, right in written.items():
        tokenizer = embedded_tokenizer() if family == "embedded" else tokenizer_of(family)
        for more in ({}, {"tool_calls": None}, {"tool_calls": []}, {"reasoning_content": ""}, {"name": None}):
            record = {"prompt": [SKY], "completion": [said("assistant", "It is 2.", **more)]}
            text, _ = solution(tokenizer, tmp_path / "a.jsonl", **record)
            assert text == right


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({"prompt": [SKY], "completion": [SKY]}, "completion"),
        ({"prompt": [SKY], "completion": [FOUR, SKY]}, "completion"),
        ({"prompt": "ground?", "completion": [SKY, FOUR]}, "completion"),
        ({"prompt": "sky?", "completion": [said("system", "Be a bird."), SKY, FOUR]}, "completion"),
        ({"prompt": [SKY], "completion": [said("assistant", None)]}, "completion"),
        ({"prompt": [SKY], "completion": [said("assistant", "", tool_calls=[call("{a")])]}, "completion"),
        ({"prompt": [SKY], "completion": [said("assistant", [{"type": "image", "image": "a.png"}])]}, "completion"),
        ({"prompt": [SKY, said("assistant", "It")], "completion": [CALLED]}, "completion"),
    ],
)
def test_solutions_that_do_not_answer_the_prompt_are_refused(refused, tmp_path, record, key):
    with refused():
        load(tokenizer_of("qwen3"), PromptFile(write(tmp_path / "a.jsonl", record), answer_key=None, solution_key=key))


def test_a_completion_that_repeats_its_prompt_is_read_without_the_prompt(tmp_path):
    for prompt in ("sky?", [SKY]):
        text, _ = solution(tokenizer_of("qwen2.5"), tmp_path / "a.jsonl", prompt=prompt, completion=[SKY, FOUR])
        assert text == "It is 4.<|im_end|>"


# Pairs

BIRD = said("system", "Be a bird.")
BLUE, GREEN = said("assistant", "blue"), said("assistant", "green")
LONG = [said("assistant", "let me see"), said("user", "ok"), BLUE]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [SKY], "chosen": LONG, "rejected": [GREEN]},
        {"prompt": "sky?", "chosen": [BIRD, SKY, BLUE], "rejected": [BIRD, SKY, GREEN]},
        {"chosen": [BIRD, SKY, BLUE], "rejected": [BIRD, SKY, GREEN]},
        {"chosen": [SKY, *LONG], "rejected": [SKY, GREEN]},
        {"chosen": [SKY, BLUE, SKY, BLUE], "rejected": [SKY, BLUE, SKY, GREEN]},
        {"chosen": [SKY, BLUE, SKY, BLUE], "rejected": [SKY, GREEN, SKY, GREEN]},
        {"prompt": [SKY], "chosen": [CALLED], "rejected": [FOUR]},
        {"prompt": [SKY], "chosen": FLOW, "rejected": [CALLED, RESULT, GREEN]},
        {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
        {"prompt": [BIRD, SKY], "chosen": [THOUGHT], "rejected": [FOUR]},
    ],
)
def test_pairs_of_messages_equal_trl(tmp_path, record):
    tokenizer = tokenizer_of("qwen3")
    (pair,) = load(tokenizer, PairFile(write(tmp_path / "a.jsonl", record)))
    right = apply_chat_template(maybe_extract_prompt(record), tokenizer)
    whole = [pair.prompt + tokenizer.decode(ids) for ids in (pair.solution_tokens, pair.rejected_tokens)]
    thinks = "<think>\n\n</think>\n\n"  # Qwen3's template writes it before an answer, which is otherwise its text alone
    for ours, key in zip(whole, ("chosen", "rejected"), strict=True):
        theirs = (right["prompt"] + right[key]).rstrip()
        assert ours == theirs or ours == theirs.replace(thinks, "")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [said("user", "ground?")], "chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
        {"chosen": [SKY, BLUE], "rejected": [said("user", "ground?"), GREEN]},
        {"chosen": [SKY, BLUE, SKY], "rejected": [SKY, BLUE, said("user", "ground?")]},
        {"chosen": [SKY, BLUE], "rejected": [SKY]},
        {"prompt": [SKY], "completion": [BLUE], "label": True},
    ],
)
def test_pairs_without_a_prompt_in_common_are_refused(refused, tmp_path, record):
    with refused():
        load(tokenizer_of("qwen3"), PairFile(write(tmp_path / "a.jsonl", record)))


def shared(message):
    return {"from": "gpt", "value": message["content"]}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [SKY], "chosen": BLUE, "rejected": GREEN},
        {"prompt": "sky?", "chosen": [BLUE], "rejected": GREEN["content"]},
        {"prompt": [{"from": "human", "value": "sky?"}], "chosen": shared(BLUE), "rejected": shared(GREEN)},
    ],
)
def test_an_answer_of_a_pair_may_be_one_message_or_a_text(tmp_path, record):
    whole = {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]}
    path = write(tmp_path / "a.jsonl", whole, record)
    right, found = load(tokenizer_of("qwen3"), PairFile(path))
    names = ("prompt_tokens", "solution_tokens", "rejected_tokens")
    assert [getattr(found, name) for name in names] == [getattr(right, name) for name in names]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_contents_in_parts_are_joined_in_all_fields(tmp_path, suffix):
    asked, answered = (
        [{"type": "text", "text": "sk"}, {"type": "text", "text": "y?"}],
        [{"type": "text", "text": "blue"}],
    )
    tokenizer = embedded_tokenizer()
    record = {"prompt": [said("user", asked)], "chosen": [said("assistant", answered)], "rejected": [GREEN]}
    if suffix == ".parquet":
        record["rejected"] = [said("assistant", [{"type": "text", "text": "green"}])]
    (pair,) = load(tokenizer, PairFile(write(tmp_path / f"a{suffix}", record)))
    assert pair.prompt == "<|user|>sky?<|assistant|>"
    assert tokenizer.decode(pair.solution_tokens) == "blue<|eos|>"
    assert tokenizer.decode(pair.rejected_tokens) == "green<|eos|>"
    data = PromptFile(write(tmp_path / f"b{suffix}", record), answer_key=None, solution_key="chosen")
    (problem,) = load(tokenizer, data)
    assert (problem.prompt, problem.solution_tokens) == (pair.prompt, pair.solution_tokens)


# Prompts


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt-oss"])  # its template writes the day
@pytest.mark.parametrize("words", ["The sky is", "Let me think.\n<think>", "It is "])
def test_a_prompt_that_ends_with_the_assistant_is_continued(tmp_path, family, words):
    tokenizer, prompt = tokenizer_of(family), [SKY, said("assistant", words)]
    right = apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
    path = write(tmp_path / "a.jsonl", {"prompt": prompt}, {"prompt": [SKY]})
    first, second = load(tokenizer, PromptFile(path, answer_key=None))
    assert first.prompt == right and tokenizer.decode(first.prompt_tokens) == right
    assert second.prompt == apply_chat_template({"prompt": [SKY]}, tokenizer)["prompt"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("content", ["", None, "missing"])
def test_a_chat_with_calls_has_the_tokens_of_the_server(tmp_path, family, arguments, content):
    tokenizer = tokenizer_of(family)
    called = said("assistant", content, tool_calls=[call(arguments)])
    if content == "missing":
        del called["content"]
    chat = [SKY, called, RESULT, FOUR, said("user", "and 3?")]
    data = PromptFile(write(tmp_path / "a.jsonl", {"prompt": chat}), answer_key=None)
    if family in ("gemma 3", "phi 3.5"):  # their templates know of no calls
        with pytest.raises(Refusal, match="shows no calls of tools"):
            load(tokenizer, data)
        return
    (problem,) = load(tokenizer, data)
    served = [SKY, said("assistant", "", tool_calls=[call({"a": 1})]), *chat[2:]]
    assert tuple(problem.prompt_tokens) == ChatFormat(tokenizer).prompt(served)


def test_a_prompt_that_ends_with_calls_is_refused(refused, tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": [SKY, CALLED, RESULT]}, {"prompt": [SKY, CALLED]})
    with refused():
        load(tokenizer_of("qwen3"), PromptFile(path, answer_key=None))


def test_two_assistant_messages_at_the_end_are_refused(refused, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [SKY, FOUR, said("assistant", "Yes.")]})
    data = PromptFile(path, answer_key=None)
    assert load(tokenizer_of("qwen2.5"), data)[0].prompt.endswith("sky?<|im_end|>\n<|im_start|>assistant\n")
    with refused():
        load(tokenizer_of("qwen2.5"), PromptFile(path, answer_key=None, solution_key="messages"))


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_are_none_count_as_missing(tmp_path, family):
    keys = {"tool_calls": None, "name": None, "tool_call_id": None, "reasoning_content": None}
    plain = [SKY, FOUR, said("user", "and 3?")]
    with_none = [message | keys for message in plain]
    path = write(tmp_path / "a.parquet", {"prompt": with_none}, {"prompt": with_none})
    tokenizer = tokenizer_of(family)
    right = load(tokenizer, PromptFile(write(tmp_path / "b.jsonl", {"prompt": plain}), answer_key=None))[0]
    assert load(tokenizer, PromptFile(path, answer_key=None))[1].prompt_tokens == right.prompt_tokens


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ messages[9].content[0] }}",
        "{{ 1/0 }}",
    ],
)
def test_an_error_in_a_template_is_a_refusal_with_its_row(tmp_path, template):
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = template
    path = write(tmp_path / "a.jsonl", {"prompt": [SKY]})
    with pytest.raises(Refusal, match="line 1: the tokenizer's chat template refuses this prompt") as caught:
        load(tokenizer, PromptFile(path, answer_key=None))
    assert "\n" not in str(caught.value)


def test_a_generated_solution_of_messages_needs_no_environment(tmp_path):
    record = {"prompt": "sky?", "solution": TURNS}
    (tmp_path / "made.py").write_text(f"def made(split, count, seed):\n    return [{record!r}] * count\n")
    tokenizer = embedded_tokenizer()
    (problem,) = load(tokenizer, Generated(f"{tmp_path}/made.py:made", train_problems=1))
    assert tokenizer.decode(problem.solution_tokens) == "It is 4.<|eos|><|user|>sure?<|assistant|>Yes.<|eos|>"
    assert problem.solution_mask.count(False) == len(tokenizer.encode("<|user|>sure?<|assistant|>"))


@pytest.mark.parametrize("system", [[], [{"from": "system", "value": "Be brief."}]])
def test_conversations_of_sharegpt(tmp_path, system):
    turns = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "It is 2."}]
    more = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    path = write(
        tmp_path / "a.jsonl", {"conversations": [*system, *turns]}, {"conversations": [*system, *turns, *more]}
    )
    tokenizer = embedded_tokenizer()
    first, second = load(tokenizer, PromptFile(path, answer_key=None, solution_key="conversations"))
    opened = "<|system|>Be brief." * bool(system) + "<|user|>1+1?<|assistant|>"
    assert (first.prompt, tokenizer.decode(first.solution_tokens)) == (opened, "It is 2.<|eos|>")
    assert second.prompt == opened + "It is 2.<|eos|><|user|>2+2?<|assistant|>"
    assert tokenizer.decode(second.solution_tokens) == "4<|eos|>"
    named = PromptFile(path, answer_key=None, prompt_key="conversations", solution_key="conversations")
    assert [one.prompt for one in load(tokenizer, named)] == [first.prompt, second.prompt]
    beside = write(tmp_path / "c.jsonl", {"conversations": [*system, *turns], "system": "Be kind."})
    (third,) = load(tokenizer, PromptFile(beside, answer_key=None, solution_key="conversations"))
    assert third.prompt == (opened if system else "<|system|>Be kind." + opened)
    called = [*turns[:1], {"from": "function_call", "value": "{}"}]
    with pytest.raises(Refusal, match=r"line 1: .*function_call of ShareGPT"):
        load(tokenizer, PromptFile(write(tmp_path / "b.jsonl", {"conversations": called}), answer_key=None))
