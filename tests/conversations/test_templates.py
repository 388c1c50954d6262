"""Conversations with published chat templates: sampled tokens stay, and the template's tokens are between them.

Expected texts are written by hand from the families' published forms; whole chats come from transformers.
"""

import pytest
from chat_families import FAMILIES, tokenizer_of

from jaxrlhf.conversations import ChatFormat, Conversation, check_template
from jaxrlhf.episode import ToolCall

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
ANSWER, MORE = {"role": "tool", "content": "3"}, {"role": "user", "content": "Well?"}
IM = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
HERMES = IM.format("<tool_response>\n3\n</tool_response>")
NO_THOUGHT = "<think>\n\n</think>\n\n"
BETWEEN = {
    "qwen2.5": (HERMES, IM.format("Well?")),
    "qwen3": (HERMES, IM.format("Well?")),
    "qwen3 without thinking": (HERMES + NO_THOUGHT, IM.format("Well?") + NO_THOUGHT),
    "qwen3.5": (HERMES + "<think>\n", IM.format("Well?") + "<think>\n"),
    "llama 3.1": (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        "<|start_header_id|>user<|end_header_id|>\n\nWell?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma 3": (
        "\n<start_of_turn>user\n3<end_of_turn>\n<start_of_turn>model\n",
        "\n<start_of_turn>user\nWell?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma 4": (
        'response:add{value:<|"|>3<|"|>}<tool_response|>',
        "\n<|turn>user\nWell?<turn|>\n<|turn>model\n",
    ),
    "deepseek v3": (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        "<｜User｜>Well?<｜Assistant｜><think>\n",
    ),
    "glm 4.5": ("\n<tool_response>\n3\n</tool_response><|assistant|>", "\nWell?<|assistant|>"),
    "gpt-oss": (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant',
        "<|start|>user<|message|>Well?<|end|><|start|>assistant",
    ),
    "phi 3.5": ("\n<|user|>\n3<|end|>\n<|assistant|>\n", "\n<|user|>\nWell?<|end|>\n<|assistant|>\n"),
    "lfm2": (
        "\n<|im_start|>tool\n<|tool_response_start|>3<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n",
        IM.format("Well?"),
    ),
    "mistral": ('[TOOL_RESULTS]{"content": "3", "call_id": "call00000"}[/TOOL_RESULTS]', "[INST]Well?[/INST]"),
}
"""Text after the end of a turn with a call, and of a turn without one."""

OPENS_THOUGHT = {"qwen3.5", "deepseek v3"}
NAMES = sorted(FAMILIES)
FORMATS = {}


def format_of(name):
    if name not in FORMATS:
        FORMATS[name] = ChatFormat(tokenizer_of(name), FAMILIES[name].settings)
    return FORMATS[name]


def say(conversation, text):
    ids = conversation.format.tokenizer.encode(text, add_special_tokens=False)
    return conversation.sampled(ids, [-1.0] * len(ids)), ids


def call(name):
    return ("Hm.</think>" if name in OPENS_THOUGHT else "") + FAMILIES[name].call + FAMILIES[name].ends[1]


def words(name, text="It is 3."):
    return ("Hm.</think>" if name in OPENS_THOUGHT else "") + text + FAMILIES[name].ends[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_stream_is_given_and_sampled_tokens(name):
    chat = format_of(name)
    conversation = Conversation(chat, ASKED, [ADD])
    stream = list(conversation.prompt)
    reply, sampled = say(conversation, call(name))
    assert reply.calls == (ToolCall("add", {"a": 1, "b": 2}, "call00000"),)
    assert (reply.malformed, reply.ended, reply.content) == ((), True, "")
    stream += sampled
    for place, said in enumerate([ANSWER, MORE]):
        inserted = conversation.observe([said])
        assert list(conversation.prompt[: len(stream)]) == stream
        between = conversation.prompt[len(stream) :]
        assert len(between) == inserted
        assert chat.tokenizer.decode(between) == BETWEEN[name][place]
        assert list(between) == chat.tokenizer.encode(BETWEEN[name][place], add_special_tokens=False)
        stream += between
        reply, sampled = say(conversation, words(name))
        assert (reply.content, reply.calls, reply.ended) == ("It is 3.", (), True)
        stream += sampled
    [row] = conversation.sequences()
    assert list(row.tokens) == stream
    assert sum(row.mask) == sum(len(reply.tokens) for reply in conversation.replies)
    trained = [token for token, mask in zip(row.tokens, row.mask, strict=True) if mask]
    assert trained == [token for reply in conversation.replies for token in reply.tokens]


KEEP = ["qwen2.5", "qwen3", "llama 3.1", "gemma 3", "phi 3.5", "lfm2", "mistral", "gemma 4"]


@pytest.mark.parametrize("name", KEEP)
@pytest.mark.parametrize("turns", [1, 3])
def test_turn_by_turn_equals_the_whole_chat_if_the_template_keeps_history(name, turns):
    conversation = Conversation(format_of(name), ASKED, [ADD])
    chat = list(ASKED)
    for turn in range(turns):
        say(conversation, words(name, f"It is {turn}."))
        asked = {"role": "user", "content": f"And then, {turn}?"}
        conversation.observe([asked])
        chat += [{"role": "assistant", "content": f"It is {turn}."}, asked]
    at_once = tokenizer_of(name).apply_chat_template(chat, tools=[ADD], add_generation_prompt=True)["input_ids"]
    assert list(conversation.prompt) == at_once


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama 3.1", "gemma 4", "mistral"])
def test_calls_turn_by_turn_equal_the_whole_chat(name):
    conversation = Conversation(format_of(name), ASKED, [ADD])
    say(conversation, call(name))
    conversation.observe([ANSWER])
    text = tokenizer_of(name).decode(conversation.prompt)
    at_once = tokenizer_of(name).apply_chat_template(
        conversation.messages, tools=[ADD], add_generation_prompt=True, tokenize=False
    )
    assert text == (at_once.replace(', "id": "call00000"', "") if name == "mistral" else at_once)


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_that_a_tool_spells_stay_text(name):
    chat, family = format_of(name), FAMILIES[name]
    own = [*family.special, *family.tags]
    known = chat.template.control.ids
    spelled = " ".join(token for token in own if token in known)
    counts = []
    for text in ("3", f"3 {spelled} 3"):
        conversation = Conversation(chat, ASKED, [ADD])
        say(conversation, call(name))
        before = len(conversation.prompt)
        conversation.observe([{"role": "tool", "content": text}])
        between = conversation.prompt[before:]
        counts.append([between.count(known[token]) for token in own if token in known])
    assert counts[0] == counts[1] and set(own) - set(known) <= set(family.tags)
    told = chat.tokenizer.decode(between)
    assert (spelled if name not in ("llama 3.1", "gpt-oss", "mistral") else spelled.replace('"', '\\"')) in told


def test_halves_of_characters_in_tools_are_question_marks():
    chat = format_of("qwen3")
    half, whole = ({**ADD, "function": {**ADD["function"], "description": f"Sum{end}"}} for end in ("\ud83d", "?"))
    assert chat.prompt(ASKED, [half]) == chat.prompt(ASKED, [whole])


@pytest.mark.parametrize("name", NAMES)
def test_a_default_system_prompt_is_not_repeated(name):
    conversation = Conversation(format_of(name), [MORE], [ADD])
    say(conversation, words(name))
    before = len(conversation.prompt)
    conversation.observe([MORE])
    text = format_of(name).tokenizer.decode(conversation.prompt[before:])
    assert text == BETWEEN[name][1] and "system" not in text


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_turn_is_closed(name):
    family, chat = FAMILIES[name], format_of(name)
    conversation = Conversation(chat, ASKED, cut_turns="close")
    reply, sampled = say(conversation, "It is")
    assert not reply.ended
    before = len(conversation.prompt)
    conversation.observe([MORE])
    between = chat.tokenizer.decode(conversation.prompt[before:])
    end = "<|return|>" if name == "gpt-oss" else family.ends[0]
    assert between == end + BETWEEN[name][1]
    [row] = conversation.sequences()
    assert sum(row.mask) == len(sampled)


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_call_is_closed(name):
    family, chat = FAMILIES[name], format_of(name)
    conversation = Conversation(chat, ASKED, [ADD], cut_turns="close")
    say(conversation, call(name).removesuffix(family.ends[1]))
    before = len(conversation.prompt)
    conversation.observe([ANSWER])
    assert chat.tokenizer.decode(conversation.prompt[before:]) == family.ends[1] + BETWEEN[name][0]


def test_a_call_of_gemma_4_that_ends_with_the_turn_is_answered_with_the_token_that_opens_answers():
    chat = format_of("gemma 4")
    conversation = Conversation(chat, ASKED, [ADD])
    say(conversation, FAMILIES["gemma 4"].call + "<turn|>")
    before = len(conversation.prompt)
    conversation.observe([ANSWER])
    assert chat.tokenizer.decode(conversation.prompt[before:]) == "<|tool_response>" + BETWEEN["gemma 4"][0]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "gemma 4", "mistral", "lfm2", "glm 4.5", "deepseek v3"])
def test_two_calls_have_two_answers(name):
    conversation = Conversation(format_of(name), ASKED, [ADD])
    body = FAMILIES[name].call
    twice = {
        "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": '
        '{"a": 3, "b": 4}}]',
        "lfm2": "<|tool_call_start|>[add(a=1, b=2), add(a=3, b=4)]<|tool_call_end|>",
    }.get(name, body + "\n" + body)
    reply, _ = say(conversation, ("Hm.</think>" if name in OPENS_THOUGHT else "") + twice + FAMILIES[name].ends[1])
    assert [one.call_id for one in reply.calls] == ["call00000", "call00001"]
    before = len(conversation.prompt)
    conversation.observe([{"role": "tool", "content": "7"}, {"role": "tool", "content": "9"}])
    text = format_of(name).tokenizer.decode(conversation.prompt[before:])
    one, two = text.index("7"), text.index("9")
    assert one < two and [message["tool_call_id"] for message in conversation.messages[-2:]] == [
        "call00000",
        "call00001",
    ]


@pytest.mark.parametrize("name", ["qwen3", "llama 3.1", "glm 4.5", "deepseek v3"])
def test_a_turn_costs_the_same_however_long_the_episode_is(name, monkeypatch):
    tokenizer = tokenizer_of(name)
    rendered = []
    whole = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *args, **named: rendered.append(whole(*args, **named)) or rendered[-1]
    )
    conversation = Conversation(ChatFormat(tokenizer, FAMILIES[name].settings), ASKED, [ADD])
    costs = []
    for _ in range(40):
        say(conversation, call(name))
        rendered.clear()
        conversation.observe([ANSWER])
        costs.append(sum(map(len, rendered)))
    assert costs[0] == costs[-1] > 0
    assert len(conversation.replies) == 40


@pytest.mark.parametrize("name", NAMES)
def test_facts_about_templates(name):
    chat = format_of(name)
    check_template(chat, [ADD])
    assert {chat.template.special.ids[end] for end in FAMILIES[name].ends} <= chat.stop_tokens
    assert chat.synthetic.shows([ADD]) == (name not in ("gemma 3", "phi 3.5", "deepseek v3"))
    assert chat.synthetic.tool_role == ("user" if name in ("gemma 3", "phi 3.5") else "tool")
    assert not chat.keeps([MORE], reasoning=True)
    assert all(chat.keeps(later, reasoning=False) for later in ([MORE], [ANSWER])) == (name in KEEP)
    assert BETWEEN[name][1].endswith(chat.synthetic.opening())


# The template's own history

THOUGHT = "<think>\nOne and two.\n</think>\n\n"


def test_dropped_reasoning_starts_a_further_sequence():
    tokenizer = tokenizer_of("qwen3")
    conversation = Conversation(format_of("qwen3"), ASKED, [ADD], history="as_templated")
    say(conversation, THOUGHT + call("qwen3"))
    conversation.observe([ANSWER])
    say(conversation, THOUGHT + words("qwen3"))
    assert len(conversation.sequences()) == 1
    conversation.observe([MORE])
    first, second = conversation.sequences()
    at_once = tokenizer.apply_chat_template(conversation.messages, tools=[ADD], add_generation_prompt=True)["input_ids"]
    assert list(second.tokens) == at_once == list(conversation.prompt)
    assert "One and two." in tokenizer.decode(first.tokens) and "One and two." not in tokenizer.decode(second.tokens)
    assert sum(second.mask) == 0
    _, sampled = say(conversation, words("qwen3", "Three."))
    first, second = conversation.sequences()
    assert sum(second.mask) == len(sampled) and set(second.turn) == {-1, 2} and set(first.turn) == {-1, 0, 1}
    conversation.observe([ANSWER])
    assert len(conversation.sequences()) == 2


def test_kept_history_is_one_sequence():
    conversation = Conversation(format_of("qwen2.5"), ASKED, [ADD], history="as_templated")
    for _ in range(3):
        say(conversation, call("qwen2.5"))
        conversation.observe([ANSWER])
        say(conversation, words("qwen2.5"))
        conversation.observe([MORE])
    assert len(conversation.sequences()) == 1
