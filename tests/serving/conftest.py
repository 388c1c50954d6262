"""A served model and OpenAI's client of it, for the files whose tests use one server."""

import openai
import pytest
from served_models import TOKEN, served


@pytest.fixture(scope="module")
def serving():
    """Server, and the model behind it."""
    with served() as pair:
        yield pair


@pytest.fixture(scope="module")
def model(serving):
    return serving[1]


@pytest.fixture(scope="module")
def client(serving):
    with openai.OpenAI(base_url=serving[0].address + "/v1", api_key=TOKEN, max_retries=0) as client:
        yield client
