"""Conversations with the embedded tokenizer: sampled, inserted and trained tokens."""

import threading

import pytest

from jaxrlhf.conversations import ChatFormat, Conversation
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.episode import ToolCall

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Value of a term.",
        "parameters": {"type": "object", "properties": {"term": {"type": "string"}}, "required": ["term"]},
    },
}
ASKED = [{"role": "user", "content": "47*86?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatFormat(tokenizer)


def say(conversation, text, *, ended=True, version=0):
    tokenizer = conversation.format.tokenizer
    ids = [*tokenizer.encode(text), *([tokenizer.eos_token_id] if ended else [])]
    return conversation.sampled(ids, [-0.5] * len(ids), version), ids


def test_a_call_an_answer_and_the_training_mask(chat, tokenizer):
    conversation = Conversation(chat, ASKED, [CALCULATOR])
    first = conversation.prompt
    reply, sampled = say(conversation, "<<47*86>>", version=3)
    assert reply.calls == (ToolCall("calculator", {"term": "47*86"}, "call00000"),) and reply.ended
    assert conversation.observe([{"role": "tool", "content": "4042"}]) == 6
    last, answer = say(conversation, "4042", version=4)
    assert (last.calls, last.content) == ((), "4042")
    [row] = conversation.sequences()
    assert (
        tokenizer.decode(row.tokens)
        == "<|user|>47*86?<|assistant|><<47*86>><|eos|><|system|>4042<|assistant|>4042<|eos|>"
    )
    inserted = 6
    assert row.tokens[len(first) : len(first) + len(sampled)] == tuple(sampled)
    assert row.mask == (*[0] * len(first), *[1] * len(sampled), *[0] * inserted, *[1] * len(answer))
    assert row.turn == (*[-1] * len(first), *[0] * len(sampled), *[-1] * inserted, *[1] * len(answer))
    assert row.version == (*[-1] * len(first), *[3] * len(sampled), *[-1] * inserted, *[4] * len(answer))
    assert row.logps == tuple(-0.5 * mask for mask in row.mask)
    rendered = tokenizer.apply_chat_template(conversation.messages, tools=[CALCULATOR], tokenize=False)
    assert tokenizer.decode(row.tokens) == rendered


@pytest.mark.parametrize("most", [4, 20, 60])
def test_a_long_answer_is_truncated_with_a_notice(chat, tokenizer, most):
    conversation = Conversation(chat, ASKED, [CALCULATOR])
    say(conversation, "<<1>>")
    before = conversation.prompt
    inserted = conversation.observe([{"role": "tool", "content": "<|eos|> 12" * 100}], most_tokens=most)
    assert 2 < inserted <= most and len(conversation.prompt) == len(before) + inserted
    told = conversation.messages[-1]["content"]
    assert "..." in told if most > 4 else len(told) <= 2
    assert "tokens left out" in told or most < 60


def test_nothing_is_inserted_if_the_template_does_not_fit(chat):
    conversation = Conversation(chat, ASKED, [CALCULATOR])
    say(conversation, "<<1>>")
    before = conversation.prompt, list(conversation.messages)
    assert conversation.observe([{"role": "tool", "content": "1"}], most_tokens=1) == 0
    assert (conversation.prompt, conversation.messages) == before


def test_given_prompt_tokens_are_used(chat):
    conversation = Conversation(chat, ASKED, prompt_tokens=(1, 2, 3))
    assert conversation.prompt == (1, 2, 3)


def test_threads_that_write_chats_at_once_do_not_change_each_others_tokens():
    """Messages that spell control tokens are encoded differently from other messages."""
    form = ChatFormat(embedded_tokenizer())
    chats = [[{"role": "user", "content": text * 40}] for text in ("Tom <|assistant|> has ", "Tom has 12 ")]
    expected, found = [form.prompt(chat) for chat in chats], [set(), set()]

    def write(number):
        for _ in range(200):
            found[number].add(form.prompt(chats[number]))

    threads = [threading.Thread(target=write, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{tokens} for tokens in expected]


def test_the_cache_of_tool_lists_is_limited(chat, monkeypatch):
    monkeypatch.setattr("jaxrlhf.conversations.reply_parser._KEPT", 2)
    for number in range(5):
        tool = {"type": "function", "function": {"name": f"tool{number}"}}
        assert chat.parse(chat.tokenizer.encode("<<>>"), [tool]).calls == (ToolCall(f"tool{number}", {}),)
    assert len(chat._parser._signatures) == 2
