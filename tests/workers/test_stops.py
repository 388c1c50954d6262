"""Stop texts of a configuration: those of one token end a response in the program, others on the host."""

from dataclasses import replace

from tiny_runs import get_config

from jaxrlhf.config import Sampling
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.workers.pool_roles import stop_texts, stop_tokens


def test_texts_of_one_token_are_tokens_and_those_of_several_are_texts():
    tokenizer, config = embedded_tokenizer(), get_config()
    stops = ("#", "</answer>", "<|user|>")
    config = replace(config, rollout=replace(config.rollout, sampling=Sampling(stop_tokens=stops)))
    own = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["#", "<|user|>"])]
    assert stop_tokens(config, tokenizer) == tuple(own)
    assert stop_texts(config, tokenizer) == ("</answer>",)
