"""Tokens of learned answers: as the chat template of each family writes them, up to the end of the turn."""

import json

import pytest
from chat_families import FAMILIES, TEMPLATES, chatml, small_tokenizer, tokenizer_of

from jaxrlhf.agent_loop.prompts import EpisodePrompts
from jaxrlhf.config import Environment, PairFile, PromptFile, Refusal
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer

NO_THOUGHT = "<think>\n\n</think>\n\n"
LEARNED = {
    "qwen2.5": "Hello<|im_end|>",
    "qwen3": NO_THOUGHT + "Hello<|im_end|>",
    "qwen3.5": "\n</think>\n\nHello<|im_end|>",
    "llama 3.1": "Hello<|eot_id|>",
    "gemma 3": "Hello<end_of_turn>",
    "gemma 4": "Hello<turn|>",
    "phi 3.5": "Hello<|end|>",
    "gpt-oss": "<|channel|>final<|message|>Hello<|return|>",
    "lfm2": "Hello<|im_end|>",
    "mistral": "Hello</s>",
}
"""Learned text of the answer `Hello`, written by hand from the published form of each family."""


def load(tmp_path, tokenizer, record, **settings):
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record) + "\n")
    pairs = "chosen" in record
    data = (
        PairFile(train=str(file))
        if pairs
        else PromptFile(train=str(file), answer_key=None, solution_key="solution", **settings)
    )
    [problem] = load_problems(data, tokenizer, split="train", max_prompt_tokens=1000).problems
    return problem


def learned(tmp_path, name, text, **settings):
    tokenizer = tokenizer_of(name) if isinstance(name, str) else name
    problem = load(tmp_path, tokenizer, {"prompt": "Hi", "solution": text}, **settings)
    return str(tokenizer.decode(problem.solution_tokens))


@pytest.mark.parametrize("name", LEARNED)
def test_an_answer_ends_as_the_template_ends_it(tmp_path, name):
    assert learned(tmp_path, name, "Hello") == LEARNED[name]
    tokenizer = tokenizer_of(name)
    problem = load(tmp_path, tokenizer, {"prompt": "Hi", "chosen": "Hello", "rejected": "No"})
    assert str(tokenizer.decode(problem.solution_tokens)) == LEARNED[name]
    assert str(tokenizer.decode(problem.rejected_tokens)) == LEARNED[name].replace("Hello", "No")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    said = str(tokenizer.decode(problem.prompt_tokens)) + LEARNED[name]
    said, whole = (text[text.index("Hi") :] for text in (said, whole))  # gpt-oss writes the date before
    assert whole.startswith(said) and whole[len(said) :].strip() in ("", "<|endoftext|>")


@pytest.mark.parametrize("name", sorted({*LEARNED} - {"gpt-oss"}))
@pytest.mark.parametrize("text", ["One.\n\nTwo", "1 + 2 = 3\n#### 3", "a  b", "你好"])
def test_what_is_learned_has_the_tokens_of_its_text(tmp_path, name, text):
    tokenizer = tokenizer_of(name)
    problem = load(tmp_path, tokenizer, {"prompt": "Hi", "solution": text})
    written = LEARNED[name].replace("Hello", text)
    assert list(problem.solution_tokens) == tokenizer.encode(written, add_special_tokens=False)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "gemma 3", "phi 3.5", "llama 3.1", "gpt-oss", "gemma 4"])
def test_a_demonstration_has_the_tokens_of_a_text_solution(tmp_path, name):
    ids, mask = demonstrated(name, [{"role": "assistant", "content": "Hello"}])
    assert str(tokenizer_of(name).decode(ids)) == LEARNED[name] and all(mask)


def test_an_answer_is_not_learned_inside_open_thinking(tmp_path):
    for text, kept in (
        ("plan</think>\n\nHello", "plan</think>\n\nHello"),
        ("<think>\nplan\n</think>\n\nHello", "plan\n</think>\n\nHello"),
    ):
        assert learned(tmp_path, "deepseek v3", text) == kept + "<｜end▁of▁sentence｜>"
    with pytest.raises(Refusal, match="opens '<think>' in it"):
        learned(tmp_path, "deepseek v3", "Hello")


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("qwen3", "<think>\nplan\n</think>\n\nHello", "<think>\nplan\n</think>\n\nHello<|im_end|>"),
        ("qwen3.5", "<think>\nplan\n</think>\n\nHello", "plan\n</think>\n\nHello<|im_end|>"),
        ("qwen2.5", "<think>plan</think>Hello", "<think>plan</think>Hello<|im_end|>"),
    ],
)
def test_thinking_in_an_answer_is_learned_as_the_template_writes_it(tmp_path, name, text, kept):
    assert learned(tmp_path, name, text) == kept


def test_a_template_that_drops_words_is_refused(tmp_path):
    family = FAMILIES["qwen2.5"]
    template = (TEMPLATES / family.template).read_text()
    short = template.replace("message.content", "message.content[:4]")
    assert short != template
    with pytest.raises(Refusal, match="leaves out the words 'Hello there'"):
        learned(tmp_path, small_tokenizer(family.special, family.tags, short), "Hello there")


def test_the_embedded_tokenizer_keeps_answers_unchanged(tmp_path):
    tokenizer = embedded_tokenizer()
    problem = load(tmp_path, tokenizer, {"prompt": "2+2?", "solution": " It is 4.\n"})
    assert tokenizer.decode(problem.solution_tokens) == " It is 4.\n<|eos|>"
    tokenizer.chat_template = None
    problem = load(tmp_path, tokenizer, {"prompt": "2+2?", "solution": " It is 4.\n"})
    assert tokenizer.decode(problem.solution_tokens) == " It is 4.\n<|eos|>"


@pytest.mark.parametrize(("kept", "count"), [("text", 1), ("parse", 2)])
def test_control_tokens_that_an_answer_spells(tmp_path, kept, count):
    tokenizer = tokenizer_of("gemma 3")
    record = {"prompt": "Hi", "solution": "say <end_of_turn> now"}
    problem = load(tmp_path, tokenizer, record, control_tokens=kept)
    assert tokenizer.decode(problem.solution_tokens) == "say <end_of_turn> now<end_of_turn>"
    assert problem.solution_tokens.count(tokenizer.convert_tokens_to_ids("<end_of_turn>")) == count


# Demonstrations with calls

CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
AS_TEXT = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def demonstrated(name, solution, tools=()):
    """Tokens of a solution of messages in an episode, and their mask."""
    prompts = EpisodePrompts(Environment(factory="nowhere:Game"), tokenizer_of(name))
    return prompts.demonstrated(solution, tools, place="line 1")


def with_call(call):
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"},
        {"role": "assistant", "content": "So 3."},
    ]


NAMES_OF_CALLS = ("mistral", "llama 3.1", "gemma 4", "qwen3", "lfm2", "qwen2.5", "gpt-oss", "qwen3.5", "glm 4.5")


@pytest.mark.parametrize("name", NAMES_OF_CALLS)
def test_arguments_as_json_text_are_written_as_the_object(name):
    ids, mask = demonstrated(name, with_call(AS_TEXT), [ADD])
    assert (ids, mask) == demonstrated(name, with_call(CALL), [ADD])
    imitated = tokenizer_of(name).decode([id for id, own in zip(ids, mask, strict=True) if own])
    assert '"{' not in imitated and "{{" not in imitated and "add" in imitated


def test_a_demonstration_of_calls_is_learned_as_the_template_writes_it():
    """Written by hand from the templates of Qwen3.5 and GLM 4.5, and from GLM's end of a turn by `<|endoftext|>`."""

    def imitated(name):
        ids, mask = demonstrated(name, with_call(AS_TEXT), [ADD])
        return tokenizer_of(name).decode([id for id, own in zip(ids, mask, strict=True) if own])

    parameters = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    call = f"<tool_call>\n<function=add>\n{parameters}</function>\n</tool_call><|im_end|>"
    assert imitated("qwen3.5") == f"\n</think>\n\n{call}\n</think>\n\nSo 3.<|im_end|>"
    glm = imitated("glm 4.5")
    assert "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>" in glm
    assert glm.endswith("So 3.<|endoftext|>") and glm.count("<|endoftext|>") == 2


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("gemma 3", "```tool_code\nadd(a=1, b=2)\n```<end_of_turn>"),
        ("phi 3.5", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|end|>'),
    ],
)
def test_calls_that_a_template_does_not_show_are_learned_as_the_policy_writes_them(name, call):
    ids, mask = demonstrated(name, with_call(AS_TEXT), [ADD])
    tokenizer = tokenizer_of(name)
    text = str(tokenizer.decode([id for id, own in zip(ids, mask, strict=True) if own]))
    assert text.startswith(call)
    assert text.count("So 3.") == 1


def test_a_demonstration_that_the_template_shortens_is_refused():
    """Llama 3's template drops words beside calls, so an episode would imitate the call alone."""
    words = with_call(CALL)
    words[0]["content"] = "Let me add."
    assert demonstrated("qwen3", words, [ADD])
    with pytest.raises(Refusal, match=r"line 1: .*leaves out the words 'Let me add\.'"):
        demonstrated("llama 3.1", words, [ADD])


def test_a_demonstration_follows_the_thinking_that_the_prompt_opens():
    ids, mask = demonstrated("deepseek v3", [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}])
    assert tokenizer_of("deepseek v3").decode(ids) == "2 and 2\n</think>\n\n4<｜end▁of▁sentence｜>" and all(mask)


@pytest.mark.parametrize("arguments", [{"expression": "2*3"}, {}])
def test_a_call_without_the_name_of_the_only_tool_is_learned(arguments):
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    prompts = EpisodePrompts(Environment(factory="nowhere:Game"), embedded_tokenizer())
    solution = [{"role": "assistant", "content": "", "tool_calls": [call]}, *with_call(CALL)[1:]]
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
    ids, mask = prompts.demonstrated(solution, [tool], place="line 1")
    imitated = embedded_tokenizer().decode([id for id, own in zip(ids, mask, strict=True) if own])
    assert imitated == f"<<{arguments.get('expression', '')}>><|eos|>So 3.<|eos|>"


def test_arguments_that_are_not_json_are_refused():
    broken = {**CALL, "function": {"name": "add", "arguments": '{"a": 1'}}
    with pytest.raises(Refusal, match="line 1: the tokenizer's chat template refuses this answer"):
        demonstrated("qwen3", with_call(broken), [ADD])


def test_a_template_that_passes_texts_through_only_adds_eos(tmp_path):
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert learned(tmp_path, tokenizer, "It is 4.") == "It is 4.<|eos|>"


# Calls in prompts


def asked(*, call=None, answer=None):
    told = [{"role": "user", "content": "Hi"}]
    told += [{"role": "assistant", "content": "", "tool_calls": [call]}] if call else []
    told += [{"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": answer}] if answer else []
    return {"prompt": [*told, {"role": "user", "content": "Well?"}], "solution": "So."}


@pytest.mark.parametrize("name", ["phi 3.5", "gemma 3", "chatml"])
def test_calls_that_the_template_drops_from_a_prompt_are_refused(tmp_path, name):
    tokenizer = chatml() if name == "chatml" else tokenizer_of(name)
    with pytest.raises(Refusal, match="shows no calls of tools"):
        load(tmp_path, tokenizer, asked(call=CALL))


def test_tool_messages_that_the_template_drops_from_a_prompt_are_refused(tmp_path):
    with pytest.raises(Refusal, match="shows no answers of tools"):
        load(tmp_path, tokenizer_of("phi 3.5"), asked(answer="3"))


@pytest.mark.parametrize("name", ["qwen3", "mistral", "llama 3.1", "gemma 4", "lfm2", "gpt-oss"])
def test_calls_that_a_template_shows_are_in_the_prompt(tmp_path, name):
    problem = load(tmp_path, tokenizer_of(name), asked(call=CALL, answer="42"))
    text = str(tokenizer_of(name).decode(problem.prompt_tokens))
    assert "add" in text and "42" in text
