"""Sessions of clients that send replies back: the sampled tokens are kept, whatever a reply says."""

import pytest
from chat_families import tokenizer_of
from scripted_models import Api

from tests.serving.test_field import CALL, GONE, USER

DESCRIBED = [
    {
        "type": "function",
        "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
    }
]
SAID = {
    "qwen3": [
        f"<think>plan</think>\n\n{CALL}<|im_end|>",
        f"<think>plan</think>\n\nLet me see. {GONE}<|im_end|>",
        "So.<|im_end|>",
    ],
    "gpt-oss": [
        "<|channel|>analysis<|message|>plan<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json<|message|>{}<|call|>",
        "<|channel|>final<|message|>So.<|return|>",
        "<|channel|>final<|message|>So.<|return|>",
    ],
    "gemma 4": ["<|tool_call>call:f{}<tool_call|><turn|>", "<|channel>thought\nplan<channel|>So.<turn|>", "So.<turn|>"],
}


@pytest.mark.parametrize("name", SAID)
def test_sampled_tokens_are_kept_over_turns(name):
    tokenizer = tokenizer_of(name)
    api = Api(tokenizer)
    base, _ = api.book.open("episode", 1)
    told = [USER]
    for text in SAID[name]:
        api.service.tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        body = {"model": "org/tiny", "messages": told, "tools": DESCRIBED}
        answer = api.request("POST", base.removeprefix("http://x") + "/chat/completions", body)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        message.pop("reasoning_content", None)  # as OpenAI's clients do
        calls = message.get("tool_calls", [])
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
        told = [*told, message, *(answers or [USER])]
    recorded = api.book.close("episode")
    [row] = recorded.sequences
    sampled = [token for token, mask in zip(row.tokens, row.mask, strict=True) if mask]
    said = [token for text in SAID[name] for token in tokenizer.encode(text, add_special_tokens=False)]
    assert sampled == said and not recorded.forks


def test_session_refuses_template_variables():
    api = Api(tokenizer_of("qwen3"), "So.")
    base, _ = api.book.open("episode", 1)
    body = {"model": "org/tiny", "messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    answer = api.request("POST", base.removeprefix("http://x") + "/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "enable_thinking")
