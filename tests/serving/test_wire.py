"""Fields of API requests: known names, wrong values, defaults and bounds."""

import pytest
from openai.types import chat, completion_create_params

from jaxrlhf.serving.errors import ApiError
from jaxrlhf.serving.wire import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "Hi"}


def test_every_field_of_openais_client_is_known():
    for params, request, required in (
        (chat.completion_create_params.CompletionCreateParamsBase, ChatRequest, {"messages": [USER]}),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest, {"prompt": "a"}),
    ):
        request.read({**dict.fromkeys({*params.__annotations__, "stream"}), "model": "tiny", **required})


WRONG = [
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": float("nan")}, "temperature", "finite number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"n": 2.0}, "n", "valid integer"),
    ({"n": True}, "n", "valid integer"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 2**31}, "max_tokens", "less than or equal to 2147483647"),
    ({"min_tokens": 2**31}, "min_tokens", "less than or equal to 2147483647"),
    ({"top_k": 2**31}, "top_k", "less than or equal to 2147483647"),
    ({"temperature": 3.0}, "temperature", "less than or equal to 2"),
    ({"seed": "3"}, "seed", "valid integer"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stream_options": {"pears": 1}}, "stream_options", "'include_usage' or 'include_obfuscation'"),
    ({"stop": ["a", ""]}, "stop", "at least 1 character"),
    ({"stop": ["a" * 257]}, "stop", "at most 256 characters"),
    ({"stop": [3]}, "stop", "valid string"),
    ({"model": 3}, "model", "valid string"),
    ({"messages": "Hi"}, "messages", "valid list"),
    ({"messages": ["Hi"]}, "messages", "valid dictionary"),
    ({"tools": {"type": "function"}}, "tools", "valid list"),
    ({"tools": [{"type": "function"}]}, "tools", "function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f" * 257}}]}, "tools", "at most 256"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 40_000}, "tools", "at most 128 items"),
]


@pytest.mark.parametrize(("options", "name", "expected"), WRONG, ids=[f"{name}-{words}" for _, name, words in WRONG])
def test_wrong_value_is_named_with_what_is_expected(options, name, expected):
    with pytest.raises(ApiError) as caught:
        ChatRequest.read({"model": "tiny", "messages": [USER], **options})
    assert (caught.value.param, caught.value.status, caught.value.code) == (name, 400, "invalid_value")
    assert expected in caught.value.message and "\n" not in caught.value.message
    assert caught.value.message.startswith(name) and len(caught.value.message) < 250


def test_null_gives_the_default_and_numbers_keep_their_bounds():
    chat = {"model": "tiny", "messages": [USER]}
    fields = ("n", "temperature", "top_k", "stop", "stream_options", "tools", "max_tokens", "logprobs", "seed")
    assert ChatRequest.read(chat | dict.fromkeys(fields)) == ChatRequest.read(chat)
    request = ChatRequest.read(chat | {"stop": "a", "stream_options": [], "top_k": -1, "temperature": 0, "seed": -1})
    assert (request.stop, request.stream_options, request.seed) == (["a"], {}, -1)
    assert (request.sampling.greedy, request.sampling.top_k) == (True, 0)
    assert ChatRequest.read(chat | {"max_tokens": 3, "max_completion_tokens": 5}).max_tokens == 5
    completion = {"model": "tiny", "prompt": [[1, 2], "a\ud83d"], "max_tokens": 0, "logprobs": 0, "n": 2, "best_of": 2}
    request = CompletionRequest.read(completion)
    assert (request.prompt, request.max_tokens, request.likely) == ([(1, 2), "a\ud83d"], 0, 0)
    assert (request.wants_logprobs, request.wants_scores) == (True, False)
    assert CompletionRequest.read(completion | {"echo": True}).wants_scores


def test_tools_up_to_the_limits_are_read():
    tools = [{"type": "function", "function": {"name": f"{n:0256}"}} for n in range(128)]
    assert ChatRequest.read({"model": "tiny", "messages": [USER], "tools": tools}).tools == tools
