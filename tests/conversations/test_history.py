"""Histories of episodes that were wrong in use: malformed calls, empty thinking, ids of calls."""

import pytest
from chat_families import small_tokenizer
from written_calls import FORMS

from jaxrlhf.conversations import ChatFormat, Conversation
from tests.conversations.test_field import AGE, ECHO, GONE, F, format_of, kimi


def say(conversation, text):
    ids = conversation.format.tokenizer.encode(text, add_special_tokens=False)
    return conversation.sampled(ids, [-1.0] * len(ids))


ASKED = [{"role": "user", "content": "Go."}]


def test_a_call_that_cannot_be_made_stays_in_the_history():
    conversation = Conversation(format_of("qwen3"), ASKED, F, history="as_templated")
    say(conversation, f"<think>\nplan\n</think>\n\n{GONE}<|im_end|>")
    conversation.observe([{"role": "tool", "content": "error: there is no tool 'g'"}])
    say(conversation, "<think>\nplan\n</think>\n\nSo.<|im_end|>")
    conversation.observe([{"role": "user", "content": "Well?"}])
    text = conversation.format.tokenizer.decode(conversation.prompt)
    assert f"<|im_start|>assistant\n{GONE}<|im_end|>\n" in text and "plan" not in text


@pytest.mark.parametrize(
    ("thought", "sequences"), [("<think>\n\n</think>\n\n", 2), ("<think>\nHm.\n</think>\n\n", 2), ("", 1)]
)
def test_empty_thinking_is_dropped_like_other_thinking(thought, sequences):
    conversation = Conversation(format_of("qwen3"), ASKED, history="as_templated")
    say(conversation, f"{thought}So.<|im_end|>")
    conversation.observe([{"role": "user", "content": "Well?"}])
    assert len(conversation.sequences()) == sequences
    text = conversation.format.tokenizer.decode(conversation.prompt)
    assert "<|im_start|>assistant\nSo.<|im_end|>" in text and "think" not in text


def test_an_answer_in_json_ends_an_episode():
    conversation = Conversation(format_of("llama 3.1"), ASKED, AGE)
    reply = say(conversation, '{"name": "Alice", "age": 3}<|eot_id|>')
    assert (reply.calls, reply.malformed, reply.ended) == ((), (), True)


def test_a_tool_answers_the_sampled_id():
    form = FORMS["kimi k2"]
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.tool_call_id %}{{ m.tool_call_id + '=' }}{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<|tool_call_begin|>' + c.id + ' ' + c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}{# <|tool_calls_section_begin|> #}"
    )
    chat = ChatFormat(small_tokenizer(("<s>", "</s>", *form.special), form.tags, template))
    conversation = Conversation(chat, ASKED, ECHO)
    reply = say(conversation, kimi("a").replace("echo:0", "echo:7") + "</s>")
    assert [call.call_id for call in reply.calls] == ["functions.echo:7"]
    conversation.observe([{"role": "tool", "content": "3"}])
    assert chat.tokenizer.decode(conversation.prompt).endswith("tool:functions.echo:7=3assistant:")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("phi 3.5", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("gemma 3", "```tool_code\nf()\n```"),
        ("lfm2", None),
    ],
)
def test_a_call_that_the_template_does_not_show_is_in_the_history_without_the_reasoning(name, call):
    chat = format_of(name)
    written = call or "<|tool_call_start|>[f()]<|tool_call_end|>"
    tokens = chat.tokenizer.encode(f"<think>plan</think>\n\nWell.\n{written}", add_special_tokens=False)
    reply = chat.parse(tokens, F)
    assert [one.name for one in reply.calls] == ["f"]
    [message] = chat.template_messages([chat.reply_message(reply)])
    assert message["content"] == (f"Well.\n{call}" if call else "Well.")
    assert ("tool_calls" in message) == (call is None)
