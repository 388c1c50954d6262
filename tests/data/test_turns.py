"""Answers of several turns: each is learned after the prompt that the template makes of the messages before it."""

import pytest
from chat_families import FAMILIES, tokenizer_of
from chat_records import CALLED_ALONE, FLOW, FOUR, RESULT, SKY, THOUGHT, TURNS, call, load, said, solution, write

from jaxrlhf.config import PromptFile, Refusal

REASONED = {"reasoning and calls", "reasoning twice", "reasoning in turns"}
THOUGHTFUL = CALLED_ALONE | {"reasoning_content": "two and two"}
FLOWS = {
    "calls": FLOW,
    "calls alone": [CALLED_ALONE, RESULT, FOUR],
    "calls twice": [CALLED_ALONE, RESULT, CALLED_ALONE, RESULT, FOUR],
    "reasoning and calls": [THOUGHTFUL, RESULT, FOUR],
    "reasoning twice": [THOUGHTFUL, RESULT, THOUGHT],
    "turns": TURNS,
    "reasoning in turns": [THOUGHT, said("user", "sure?"), THOUGHT],
}
REFUSED = {
    "deepseek v3": set(FLOWS),  # it opens thinking, and shows none
    "glm 4.5": set(FLOWS),  # nothing ends a turn but the next header
    "llama 3.1": {"calls", *REASONED},  # it drops words beside calls
    "mistral": {"calls", *REASONED},
    "gemma 4": {"calls", "reasoning twice", "reasoning in turns"},  # it moves words behind a tool's answer
    "qwen2.5": REASONED,
    "lfm2": REASONED,
    "qwen3": {"reasoning in turns"},  # it drops the reasoning of earlier turns
    "qwen3 without thinking": {"reasoning in turns"},
    "qwen3.5": {"turns", "reasoning in turns"},
    "gpt-oss": {"turns", "reasoning in turns"},  # its end of an earlier turn is not what the policy writes
}
"""Chats that the templates drop parts of, or write in another way once more messages follow."""


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("flow", FLOWS)
def test_each_answer_is_learned_after_what_the_policy_sees_there(tmp_path, family, flow):
    tokenizer, chat = tokenizer_of(family), [SKY, *FLOWS[flow]]
    path = write(tmp_path / "a.jsonl", {"prompt": [SKY], "completion": chat[1:]})
    data = PromptFile(path, answer_key=None, solution_key="completion")
    if flow in REFUSED[family]:
        with pytest.raises(Refusal, match="chat template"):
            load(tokenizer, data)
        return
    (problem,) = load(tokenizer, data)
    ids = [*problem.prompt_tokens, *problem.solution_tokens]
    mask = problem.solution_mask or [True] * len(problem.solution_tokens)
    begins = [n for n, own in enumerate(mask) if own and (n == 0 or not mask[n - 1])]
    given = [{**message, "thinking": message.get("reasoning_content", "")} for message in chat]
    answers = [n for n, message in enumerate(given) if message["role"] == "assistant"]
    for begin, n in zip(begins, answers, strict=True):
        before = tokenizer.decode(ids[: len(problem.prompt_tokens) + begin])
        right = tokenizer.apply_chat_template(given[:n], tokenize=False, add_generation_prompt=True)
        assert before[before.index("sky?") :] == right[right.index("sky?") :]  # gpt-oss writes the date before
    special = {tokenizer.convert_tokens_to_ids(text) for text in FAMILIES[family].special}
    ends = [n for n, own in enumerate(mask) if own and (n + 1 == len(mask) or not mask[n + 1])]
    assert all(problem.solution_tokens[n] in special for n in ends)


def test_reasoning_is_kept_where_a_final_answer_makes_the_template_drop_it(tmp_path):
    completion = [THOUGHTFUL, RESULT, THOUGHT]
    text, learned = solution(tokenizer_of("gpt-oss"), tmp_path / "a.jsonl", prompt=[SKY], completion=completion)
    assert learned == [
        "<|channel|>analysis<|message|>two and two<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
        '<|message|>{"a": 1}<|call|>',
        "<|channel|>analysis<|message|>two and two<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
    ]
    told = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
    assert text == told.join(learned)


def test_reasoning_follows_the_thinking_that_a_prompt_opens(tmp_path):
    tokenizer = tokenizer_of("deepseek v3")
    text, _ = solution(tokenizer, tmp_path / "a.jsonl", prompt=[SKY], completion=[THOUGHT])
    assert text == "two and two\n</think>\n\n4<｜end▁of▁sentence｜>"
    called = said("assistant", "", tool_calls=[call('{"a": 1}')])
    text, _ = solution(tokenizer, tmp_path / "b.jsonl", prompt=[SKY, called, RESULT], completion="It is 4.")
    assert text == "It is 4.<｜end▁of▁sentence｜>"  # after a tool's answer the template opens no thinking


@pytest.mark.parametrize("family", ["qwen2.5", "gpt-oss"])
def test_control_tokens_of_messages_are_tokens_also_where_texts_keep_theirs_as_text(tmp_path, family):
    tokenizer = tokenizer_of(family)
    path = write(tmp_path / "a.jsonl", {"prompt": [SKY], "completion": [CALLED_ALONE, RESULT, FOUR]})
    kept, parsed = (
        load(tokenizer, PromptFile(path, answer_key=None, solution_key="completion", control_tokens=how))[0]
        for how in ("text", "parse")
    )
    assert kept.solution_tokens == parsed.solution_tokens
    assert kept.solution_tokens[-1] == tokenizer.convert_tokens_to_ids(FAMILIES[family].ends[0])
