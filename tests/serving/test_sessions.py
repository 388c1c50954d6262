"""Sessions of agents: sequences that the server records of continued and of new conversations."""

import asyncio
import json
import threading
from dataclasses import replace

import httpx2
import openai
import pytest

from jaxrlhf.config.serving import SessionLimits
from jaxrlhf.conversations import ChatFormat
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import Completion
from jaxrlhf.serving.call_tree import CallTree, Prompt
from jaxrlhf.serving.endpoints import chat_answer, whole
from jaxrlhf.serving.errors import ApiError
from jaxrlhf.serving.wire import ChatRequest

ASK = {"model": "tiny", "max_tokens": 12}
FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tom has 12 apples."}]
pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture
def book(serving):
    return serving[0].sessions


def episode(book, name, *, turns=4, seed=7, by_key=False, spoil=lambda messages: messages):
    """Run an agent of several turns; return the replies and the recorded episode."""
    url, key = book.open(name, seed)
    given = {"base_url": url.replace(url[url.index("/s/") : url.index("/v1")], "") if by_key else url}
    told = []
    with openai.OpenAI(**given, api_key=key if by_key else "anything", max_retries=0) as client:
        messages = list(FIRST)
        for turn in range(turns):
            answer = client.chat.completions.create(messages=messages, **ASK)
            told.append(answer.choices[0].message.content)
            messages = spoil(
                [*messages, {"role": "assistant", "content": told[-1]}, {"role": "user", "content": f"And {turn}?"}]
            )
    return told, book.close(name)


@pytest.mark.parametrize("by_key", [False, True], ids=["by path", "by key"])
def test_continued_calls_are_one_sequence_of_sampled_ids(book, model, by_key):
    reused = model.service.counts.cached_tokens
    told, recorded = episode(book, "one", by_key=by_key)
    [sequence] = recorded.sequences
    assert (len(recorded.replies[0]), dict(recorded.forks), recorded.reward) == (4, {}, None)
    assert sorted(set(sequence.turn)) == [-1, 0, 1, 2, 3]
    text = model.tokenizer.decode(sequence.tokens, skip_special_tokens=False)
    for turn, words in enumerate(told):
        sampled = [token for token, of in zip(sequence.tokens, sequence.turn, strict=True) if of == turn]
        assert model.form.parse(sampled).content == words
    assert text.count("And ") == 3
    for mask, logp, version in zip(sequence.mask, sequence.logps, sequence.version, strict=True):
        assert (logp < 0, version == 4) == (bool(mask), bool(mask))
    assert model.service.counts.cached_tokens - reused > len(sequence.tokens), "turns were prefilled again"


def test_episode_depends_only_on_seed_and_name(book):
    alone = episode(book, "same")
    others = [threading.Thread(target=episode, args=(book, f"other {n}"), kwargs={"seed": n}) for n in range(4)]
    for thread in others:
        thread.start()
    together = episode(book, "same")
    for thread in others:
        thread.join()
    assert together[0] == alone[0]
    assert together[1].sequences[0].tokens == alone[1].sequences[0].tokens
    assert episode(book, "same", seed=8)[0] != alone[0]
    assert episode(book, "another")[0] != alone[0]


def test_edited_histories_start_sequences_and_are_counted(book):
    def forgets(messages):
        return [*messages[:2], *messages[-1:]] if len(messages) > 4 else messages

    def rewrites(messages):
        return [
            {**message, "content": "He said so."} if message["role"] == "assistant" else message for message in messages
        ]

    _, recorded = episode(book, "rewriting", spoil=rewrites)
    assert (len(recorded.sequences), recorded.forks["edited"]) == (4, 3)
    assert sum(sum(sequence.mask) for sequence in recorded.sequences) <= 4 * 12
    _, recorded = episode(book, "forgetting", spoil=forgets)
    assert len(recorded.sequences) > 1


def test_branches_share_sampled_tokens_and_train_them_once(book, model):
    url, key = book.open("branches", 3)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        first = client.chat.completions.create(messages=FIRST, **ASK).choices[0].message.content
        for words in ("And now?", "And then?"):
            messages = [*FIRST, {"role": "assistant", "content": first}, {"role": "user", "content": words}]
            client.chat.completions.create(messages=messages, **ASK)
        twice = client.chat.completions.create(messages=FIRST, n=2, **ASK)
        other = client.chat.completions.create(messages=FIRST, tools=[TOOL], **ASK)
    recorded = book.close("branches")
    assert len({choice.message.content for choice in (*twice.choices, other.choices[0])} | {first}) == 4
    assert len(recorded.sequences) == 5
    continued = [sequence for sequence in recorded.sequences if 1 in sequence.turn]
    assert sorted(0 in sequence.turn for sequence in continued) == [False, True]
    sampled = sum(sum(sequence.mask) for sequence in recorded.sequences)
    assert sampled <= 6 * 12


@pytest.mark.parametrize(("together", "order"), [(False, "915"), (True, "159")])
def test_sequences_are_in_call_order_unless_calls_were_parallel(book, model, together, order):
    async def asks(url, key):
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            calls = [
                client.chat.completions.create(
                    messages=[{"role": "user", "content": f"of {word}"}], **ASK, extra_body={"min_tokens": 12}
                )
                for word in "915"
            ]
            await asyncio.gather(*calls) if together else [await call for call in calls]

    asyncio.run(asks(*book.open("ordered", 3)))
    texts = [model.tokenizer.decode(sequence.tokens) for sequence in book.close("ordered").sequences]
    assert [text.partition("of ")[2][0] for text in texts] == list(order)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_rewards_limits_and_late_calls(book):
    url, key = book.open("paid", 1, SessionLimits(calls=2, call_tokens=5))
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        answers = [client.chat.completions.create(messages=FIRST, **ASK) for _ in range(2)]
        assert all(answer.usage.completion_tokens <= 5 for answer in answers)
        with pytest.raises(openai.PermissionDeniedError) as caught:
            client.chat.completions.create(messages=FIRST, **ASK)
        assert caught.value.code == "limit_calls"
        pay = url.removesuffix("/v1") + "/reward"
        assert httpx2.post(pay, json={"reward": 1.0}).status_code == 200
        assert httpx2.post(pay, json={"reward": 0.5, "response_id": answers[1].id}).status_code == 200
        for wrong in ({"reward": "a"}, {"reward": float("nan")}, {}, []):
            assert httpx2.post(pay, content=json.dumps(wrong)).status_code == 400
        for unknown in ("no", []):
            assert httpx2.post(pay, json={"reward": 1, "response_id": unknown}).status_code == 404
        recorded = book.close("paid")
        assert recorded.reward == 1.0
        assert list(recorded.rewards.values()) == [0.5]
        assert dict(recorded.refused) == {"calls": 1}
        for late in (lambda: client.chat.completions.create(messages=FIRST, **ASK), client.models.list):
            with pytest.raises(openai.ConflictError):
                late()
    assert httpx2.post(pay, json={"reward": 1.0}).status_code == 409
    url, _ = book.open("silent", 1)
    assert httpx2.get(url.replace("/s/", "/s/x") + "/models").status_code == 404
    recorded = book.close("silent")
    assert recorded.sequences == ()


NOT_TRAINED = [
    ("chat", "response_format", {"response_format": {"type": "json_object"}}),
    ("chat", "top_logprobs", {"logprobs": True, "top_logprobs": 2}),
    ("chat", "parallel_tool_calls", {"parallel_tool_calls": False, "tools": [TOOL]}),
    ("chat", "ignore_eos", {"ignore_eos": True}),
    ("completion", "logprobs", {"logprobs": 1}),
    ("completion", "echo", {"echo": True, "logprobs": 0}),
    ("completion", "max_tokens", {"max_tokens": 0}),
]


@pytest.mark.parametrize(("kind", "name", "options"), NOT_TRAINED, ids=[name for _, name, _ in NOT_TRAINED])
def test_untrainable_fields_are_refused_by_name(book, kind, name, options):
    url, key = book.open("narrowed", 1)
    fields = {"messages": FIRST} if kind == "chat" else {"prompt": "Tom has"}
    path = "/chat/completions" if kind == "chat" else "/completions"
    answer = httpx2.post(url + path, json={**ASK, **fields, **options}, headers={"Authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert book.close("narrowed").sequences == ()


def test_choices_share_the_remaining_tokens(book):
    url, key = book.open("shared", 1, SessionLimits(tokens=10))
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(messages=FIRST, n=4, **{**ASK, "extra_body": {"min_tokens": 12}})
    assert answer.usage.completion_tokens <= 10
    assert len(book.close("shared").sequences) == 4


def test_request_of_a_closed_session_is_not_sampled(book, model):
    url, _ = book.open("late", 1)
    session = book.find(url.split("/")[-2])
    answer = chat_answer(model, ChatRequest.read({"model": "tiny", "messages": FIRST}), session)
    before = model.service.counts.requests
    book.close("late")
    with pytest.raises(ApiError, match="has ended"):
        asyncio.run(whole(answer))
    assert model.service.counts.requests == before


def completion(*tokens):
    return Completion(0, tokens, (-1.0,) * len(tokens), False, 0)


def test_episode_may_have_thousands_of_calls():
    tree, stream, call = CallTree(ChatFormat(embedded_tokenizer())), (5,), None
    for _ in range(3000):
        call = tree.record(Prompt(stream, call), completion(6))
        stream = call.tokens
    [sequence], [path] = tree.sequences()
    assert sequence.tokens == stream and len(path) == 3000


def test_stop_texts_of_the_run_stay_in_the_reply(book, model, monkeypatch):
    [word, *_], _ = episode(book, "stops", turns=1)
    stop, engine = word[2:4], model.service.engine
    monkeypatch.setattr(engine, "limits", replace(engine.limits, stop_texts=(stop,)))
    [said], _ = episode(book, "stops", turns=1)
    assert stop in said and word.startswith(said) and said != word


def test_only_the_last_ended_sessions_are_remembered(book, monkeypatch):
    monkeypatch.setattr("jaxrlhf.serving.sessions.REMEMBERED_ENDED", 2)
    urls = []
    for name in range(3):
        urls.append(book.open(name, 1)[0])
        book.close(name)
    late = [httpx2.get(url + "/models", headers={"Authorization": "Bearer no"}).status_code for url in urls]
    assert late == [404, 409, 409]


def test_closing_a_session_cancels_its_calls(book, model):
    url, key = book.open("cut", 1)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        long = {**ASK, "max_tokens": 128, "stream": True, "extra_body": {"min_tokens": 128}}
        events = iter(client.chat.completions.create(messages=FIRST, **long))
        next(events)
        book.close("cut")
        with pytest.raises(openai.APIError, match=r"cancelled|ended"):
            list(events)


def test_completions_continue_by_ids_and_by_text(book, model):
    url, key = book.open("plain", 1)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        ask = {**ASK, "extra_body": {"return_token_ids": True}}
        first = client.completions.create(prompt="Tom has", **ask).choices[0]
        stream = [*first.prompt_token_ids, *first.token_ids]
        second = client.completions.create(prompt=[*stream, 9], **ask).choices[0]
        stream = [*stream, 9, *second.token_ids]
        text = model.tokenizer.decode(stream, skip_special_tokens=False)
        third = client.completions.create(prompt=text + " and", **ask).choices[0]
    [sequence] = book.close("plain").sequences
    assert list(sequence.tokens) == [*third.prompt_token_ids, *third.token_ids]
    assert third.prompt_token_ids[: len(stream)] == stream


def test_retokenised_text_starts_a_sequence_and_is_counted(book, model):
    word, letters = model.tokenizer.encode("Tom"), model.tokenizer.convert_tokens_to_ids([*"Tom"])
    url, key = book.open("letters", 1)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        ask = {**ASK, "extra_body": {"return_token_ids": True}}
        first = client.completions.create(prompt=word, **ask).choices[0]
        client.completions.create(prompt=[*letters, *first.token_ids, 9], **ask)
    recorded = book.close("letters")
    assert (len(word), len(recorded.sequences), dict(recorded.forks)) == (1, 2, {"retokenised": 1})


def test_omitted_reasoning_is_no_edit():
    from jaxrlhf.episode import Reply

    tree = CallTree(ChatFormat(embedded_tokenizer()))
    prompt = tree.chat_prompt(FIRST, ())
    message = {"role": "assistant", "content": "12", "reasoning_content": "so"}
    reply = Reply("so12", "12", "so", ended=True)
    call = tree.record(prompt, completion(5, 6, 2), reply=reply, message=message)
    asked = {"role": "user", "content": "Sure?"}
    assert tree.chat_prompt([*FIRST, {"role": "assistant", "content": "12"}, asked], ()).before is call
    assert tree.chat_prompt([*FIRST, message, asked], ()).before is call
    other = tree.chat_prompt([*FIRST, {**message, "reasoning_content": "no"}, asked], ())
    assert (other.before, other.fork) == (None, "edited")
    refused = tree.chat_prompt([*FIRST, message, asked], (TOOL,))
    assert (refused.before, refused.fork) == (None, "edited")
    tree.record(other, completion(5))
    assert dict(tree.forks) == {"edited": 1}, "a prompt without a sampled response is no sequence"


def test_text_continues_a_call_after_a_bos_token():
    form = ChatFormat(embedded_tokenizer())
    encode = form.tokenizer.encode
    tree, bos = CallTree(form), form.tokenizer.bos_token_id
    text = "Tom has"
    letters = form.tokenizer.convert_tokens_to_ids([*"apples"])  # which is not how a text is encoded
    first = tree.record(tree.completion_prompt((bos, *encode(text)), text), completion(*letters))
    text += "apples and"
    prompt = tree.completion_prompt((bos, *encode(text)), text)
    assert prompt.before is first and prompt.tokens == (*first.tokens, *encode(" and"))
