"""Answers of several turns, learned after the text that the policy sees, and prompts with all messages and tools."""

import json
import re

import pytest
from chat_families import FAMILIES, TEMPLATES, small_tokenizer, tokenizer_of
from chat_records import CALLED_ALONE, FLOW, FOUR, RESULT, SKY, THOUGHT, TURNS, call, load, said, solution, write
from trl.data_utils import apply_chat_template

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
"""Chats with a part that the template drops, or writes differently if messages follow."""


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.parametrize("flow", FLOWS)
def test_each_answer_is_learned_after_the_text_that_the_policy_sees(tmp_path, family, flow):
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


def test_user_messages_after_tool_messages_are_joined_if_the_template_has_no_role_for_tools(tmp_path):
    """Gemma 3's template refuses two user messages in a row; the server joins them too."""
    completion = [FOUR, RESULT, *TURNS[1:]]
    text, learned = solution(tokenizer_of("gemma 3"), tmp_path / "a.jsonl", prompt=[SKY], completion=completion)
    assert learned == ["It is 4.<end_of_turn>", "Yes.<end_of_turn>"]
    assert text.count("<start_of_turn>user") == 1 and "4\n\nsure?" in text


def test_reasoning_follows_the_thinking_that_a_prompt_opens(tmp_path):
    tokenizer = tokenizer_of("deepseek v3")
    text, _ = solution(tokenizer, tmp_path / "a.jsonl", prompt=[SKY], completion=[THOUGHT])
    assert text == "two and two\n</think>\n\n4<｜end▁of▁sentence｜>"
    called = said("assistant", "", tool_calls=[call('{"a": 1}')])
    text, _ = solution(tokenizer, tmp_path / "b.jsonl", prompt=[SKY, called, RESULT], completion="It is 4.")
    assert text == "It is 4.<｜end▁of▁sentence｜>"  # after a tool's answer the template opens no thinking


@pytest.mark.parametrize("family", ["qwen2.5", "gpt-oss"])
def test_control_tokens_of_the_template_stay_tokens(tmp_path, family):
    tokenizer = tokenizer_of(family)
    path = write(tmp_path / "a.jsonl", {"prompt": [SKY], "completion": [CALLED_ALONE, RESULT, FOUR]})
    kept, parsed = (
        load(tokenizer, PromptFile(path, answer_key=None, solution_key="completion", control_tokens=how))[0]
        for how in ("text", "parse")
    )
    assert kept.solution_tokens == parsed.solution_tokens
    assert kept.solution_tokens[-1] == tokenizer.convert_tokens_to_ids(FAMILIES[family].ends[0])


# Prompts that would lose something

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NOTE = {"type": "function", "function": {"name": "note", "description": "A note.", "parameters": {"type": "object"}}}


def prompt(tmp_path, family, suffix=".jsonl", **record):
    data = PromptFile(write(tmp_path / f"a{suffix}", record), answer_key=None)
    return load(tokenizer_of(family), data)[0].prompt


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama 3.1", "gemma 3", "phi 3.5", "mistral", "gpt-oss"])
def test_developer_messages_are_system_messages(tmp_path, family):
    brief = [said("system", "Be brief."), SKY]
    right = prompt(tmp_path, family, prompt=brief)
    assert "Be brief." in right
    assert prompt(tmp_path, family, prompt=[brief[0] | {"role": "developer"}, SKY]) == right


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([SKY, said("critic", "Wrong."), SKY], "leaves out the message 'Wrong.' of the role 'critic'"),
        ([SKY, said("assistant", "", function_call={"name": "f", "arguments": "{}"}), SKY], "write 'tool_calls'"),
        ([SKY, said("function", "4", name="f")], "messages of role 'tool'"),
    ],
)
def test_messages_that_the_template_drops_are_refused(tmp_path, messages, words):
    with pytest.raises(Refusal, match=f"line 1: .*{words}"):
        prompt(tmp_path, "qwen2.5", prompt=messages)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "qwen3.5", "llama 3.1", "lfm2"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_tools_of_a_record_are_shown_as_in_trl(tmp_path, family, suffix):
    right = apply_chat_template({"prompt": [SKY]}, tokenizer_of(family), tools=[ADD, NOTE])["prompt"]
    assert "Sum." in right
    assert prompt(tmp_path, family, suffix, prompt=[SKY], tools=[ADD, NOTE]) == right
    assert prompt(tmp_path, family, suffix, prompt=[SKY], tools=json.dumps([ADD, NOTE])) == right
    plain = prompt(tmp_path, family, suffix, prompt=[SKY])
    for other in ([], None, ["add"], "none", [{"name": None, "of": "hammers"}]):
        assert prompt(tmp_path, family, suffix, prompt=[SKY], tools=other) == plain


def test_tools_that_a_template_does_not_show_are_refused(tmp_path):
    with pytest.raises(Refusal, match="line 1: the tokenizer's chat template shows no tools"):
        prompt(tmp_path, "gemma 3", prompt=[SKY], tools=[ADD])


# All templates of TRL

CONTROL = re.compile(r"<[|｜][^<>|｜ ]{2,40}[|｜]>|<(?:end_of_turn|start_of_turn)>|<turn\|>|<\|turn>|\[/?INST\]")
UNSHOWN = ("idefics3", "llava_next", "smolvlm")
"""Templates that show texts only in parts."""
OPENS = (
    "deepseek_r1_distill",
    "deepseekv3",
    *(f"nemotron_3_{name}" for name in ("5_lightning", "nano", "super", "ultra")),
)
"""Templates that open thinking in the prompt, and write an answer without thinking in another place."""


@pytest.mark.parametrize(
    "name", [file.stem for file in sorted(TEMPLATES.glob("*.jinja")) if "training" not in file.stem]
)
def test_an_answer_is_the_rest_of_its_turn_in_every_template(tmp_path, name):
    template = (TEMPLATES / f"{name}.jinja").read_text()
    special = ("<s>", "</s>", *sorted({*CONTROL.findall(template)}))
    tokenizer, four = small_tokenizer(special, (), template), said("assistant", "It is 4.")
    path = write(tmp_path / "a.jsonl", {"prompt": [SKY], "solution": "It is 4."})
    data = PromptFile(path, answer_key=None, solution_key="solution")
    if name in (*UNSHOWN, *OPENS):
        words = "leaves out the message 'sky" if name in UNSHOWN else "opens '<think>' in it"
        with pytest.raises(Refusal, match=words):
            load(tokenizer, data)
        return
    (problem,) = load(tokenizer, data)
    learned = str(tokenizer.decode(problem.solution_tokens))
    shown, longer = (
        tokenizer.apply_chat_template(chat, tokenize=False).partition("sky?")[2]
        for chat in ([SKY, four], [SKY, four, said("user", "sure?")])
    )
    opened = problem.prompt.partition("sky?")[2]
    if name != "glm4moe":  # nothing but the next header ends its turns, so EOS does
        assert shown.startswith(opened + learned)
        assert "It is 4." in learned and problem.solution_tokens[-1] in tokenizer.convert_tokens_to_ids([*special])
    after = longer.partition("It is 4.")[2]  # all that the template writes after the answer until the user's header
    ends = learned.partition("It is 4.")[2]
    assert name in ("glm4moe", "gptoss") or after.startswith(ends)
