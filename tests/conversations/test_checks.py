"""Chat templates and tokenizers that conversations refuse, and response templates of transformers."""

import pytest
from chat_families import FAMILIES, TEMPLATES, small_tokenizer
from tokenizers import pre_tokenizers
from written_calls import NOTE

from jaxrlhf.conversations import ChatFormat, Conversation, check_template
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.episode import EnvironmentFailure, ToolCall

USER = [{"role": "user", "content": "?"}]


def with_template(template):
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_tokenizer_without_a_template(refused):
    with refused():
        ChatFormat(with_template(None))


def test_a_template_that_shows_no_replies(refused):
    with refused():
        ChatFormat(with_template("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"))


def test_a_context_dependent_tokenizer(refused):
    tokenizer = embedded_tokenizer()
    spaces = pre_tokenizers.Metaspace(replacement="#", prepend_scheme="first")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [spaces, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with refused():
        check_template(ChatFormat(tokenizer), [NOTE])


def test_a_template_that_numbers_its_turns(refused):
    numbered = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + loop.index | string + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' + (messages | length + 1) | string }}{% endif %}"
    )
    with refused():
        check_template(ChatFormat(with_template(numbered)), [])


def test_the_embedded_tokenizer_is_right():
    chat = ChatFormat(embedded_tokenizer())
    check_template(chat, [NOTE])
    assert (chat.stop_tokens, chat.synthetic.opening()) == ({chat.tokenizer.eos_token_id}, "<|assistant|>")
    assert (chat.family, chat.synthetic.tool_role, chat.synthetic.shows([NOTE])) == ("embedded", "tool", False)


def test_messages_that_a_template_refuses_are_the_environments_fault():
    family = FAMILIES["gemma 3"]
    template = (TEMPLATES / family.template).read_text()
    chat = ChatFormat(small_tokenizer(family.special, family.tags, template))
    with pytest.raises(EnvironmentFailure) as caught:
        Conversation(chat, [*USER, *USER])
    assert caught.value.cause == "wrong-type" and "alternate" in caught.value.detail


def test_halves_of_characters_and_private_ones_become_tokens():
    tokenizer = embedded_tokenizer()
    conversation = Conversation(ChatFormat(tokenizer), USER)
    conversation.sampled([tokenizer.eos_token_id], [-1.0])
    conversation.observe([{"role": "user", "content": "a\ud800b \ue000\ue005 <|eos|>"}])
    assert tokenizer.decode(conversation.prompt).endswith("a?b \ufffd\ue005 <|eos|><|assistant|>")
    assert conversation.prompt.count(tokenizer.eos_token_id) == 1


def test_an_answer_without_words():
    for name in ("qwen3", "gemma 3"):
        family = FAMILIES[name]
        template = (TEMPLATES / family.template).read_text()
        tokenizer = small_tokenizer(family.special, family.tags, template)
        conversation = Conversation(ChatFormat(tokenizer), USER, [NOTE])
        ids = tokenizer.encode("So." + family.ends[0])
        conversation.sampled(ids, [-1.0] * len(ids))
        assert conversation.observe([{"role": "tool", "content": ""}]) > 0


def test_each_token_needs_a_log_probability():
    conversation = Conversation(ChatFormat(embedded_tokenizer()), USER)
    with pytest.raises(ValueError, match="2 tokens were sampled and 1"):
        conversation.sampled([7, 8], [-1.0])
    with pytest.raises(ValueError, match="after a reply"):
        conversation.observe(USER)
    conversation.sampled([7], [-1.0])
    with pytest.raises(ValueError, match="was truncated"):
        conversation.observe(USER)


# transformers' response parsing

RESPONSES = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"content": "text"},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
    },
}


def test_the_response_template_of_a_tokenizer_parses_first():
    tokenizer = embedded_tokenizer()
    tokenizer.response_template = RESPONSES
    chat = ChatFormat(tokenizer)
    conversation = Conversation(chat, USER, [NOTE])
    assert chat.family == "response_template"
    ids = [*tokenizer.encode('<think>Hm.</think>So<call>{"name": "note", "arguments": {"text": "a"}}</call>'), 2]
    reply = conversation.sampled(ids, [-1.0] * len(ids))
    assert reply.calls == (ToolCall("note", {"text": "a"}, "call00000"),)
    assert (reply.reasoning, reply.content) == ("Hm.", "So")
    conversation.observe([{"role": "tool", "content": "Noted."}])
    broken = [*tokenizer.encode("So<call>no</call> <<it"), 2]
    reply = conversation.sampled(broken, [-1.0] * len(broken))
    assert reply.calls == () and [one.kind for one in reply.malformed] == ["structure"]


def test_the_content_of_a_call_may_be_any_json():
    tokenizer, calls = embedded_tokenizer(), RESPONSES["fields"]["tool_calls"]
    function = {**calls, "transform": {"type": "function", "function": "{content}"}}
    tokenizer.response_template = {**RESPONSES, "fields": {**RESPONSES["fields"], "tool_calls": function}}
    chat = ChatFormat(tokenizer)
    call = '{"name": "note", "arguments": {"text": "a"}}'
    for text, count in ((call, 1), (f"[{call}, {call}]", 2), (f"[{call}, 3]", 1), ('"note"', 0), ("null", 0)):
        reply = chat.parse(tokenizer.encode(f"<call>{text}</call>"), [NOTE])
        assert reply.calls == (ToolCall("note", {"text": "a"}),) * count
        assert [one.kind for one in reply.malformed] == ["structure"] * (count == 0 or "3" in text)


@pytest.mark.parametrize("calls", [[{"name": "note", "arguments": {}}], ["note"], 5, [{"function": {"name": "note"}}]])
def test_calls_in_other_forms_than_the_templates_are_the_environments_fault(calls):
    family = FAMILIES["deepseek v3"]
    chat = ChatFormat(small_tokenizer(family.special, family.tags, (TEMPLATES / family.template).read_text()))
    call = {"function": {"name": "note", "arguments": {}}}
    given = chat.template.form.given({"role": "assistant", "tool_calls": [call]})
    assert given["tool_calls"][0]["function"]["arguments"] == "{}"
    with pytest.raises(EnvironmentFailure, match="the chat template refuses"):
        Conversation(chat, [*USER, {"role": "assistant", "content": "", "tool_calls": calls}, *USER])
