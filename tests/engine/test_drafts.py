"""Drafts are what follows the longest match in the texts of a prompt, and these texts are bounded."""

import numpy as np

from jaxrlhf.engine.speculation.drafts import (
    FEWEST_MATCHED,
    MOST_MATCHED,
    NO_DRAFT,
    PIECE_TOKENS,
    Draft,
    DraftIndex,
    TokenText,
)


def index_of(prompt, *tokens, **sizes):
    """Index with running responses 0, 1, ... to one prompt."""
    index = DraftIndex(**sizes)
    for number, sampled in enumerate(tokens):
        index.start(number, prompt)
        index.extend(number, sampled)
    return index


def test_a_prompt_is_copied_after_a_match_in_it():
    index = index_of((5, 6, 7, 8, 9), (6, 7))
    assert index.draft(0, 8) == Draft((8, 9, 6, 7), 2)
    assert index.draft(0, 1) == Draft((8,), 2)
    assert index.draft(0, 0) == NO_DRAFT


def test_one_token_is_no_match():
    assert FEWEST_MATCHED == 2
    assert index_of((5, 6, 7), (1, 6)).draft(0, 4) == NO_DRAFT
    assert index_of((5,), ()).draft(0, 4) == NO_DRAFT


def test_the_longest_match_counts_though_a_shorter_one_is_newer():
    index = index_of((1, 2, 3, 4, 50, 2, 3, 60), (1, 2, 3))
    assert index.draft(0, 1) == Draft((4,), 3)


def test_what_a_response_repeats_is_drafted_from_itself():
    index = index_of((1, 2), (7, 8, 9, 7, 8))
    assert index.draft(0, 5) == Draft((9, 7, 8), 2)


def test_equally_long_matches_vote_token_by_token():
    index = index_of((1, 2, 7, 7, 1, 2, 8, 5, 1, 2, 7, 6, 1, 2, 7, 6, 4), (1, 2))
    assert index.draft(0, 3) == Draft((7, 6, 4), 2), "the newest of two equal votes"


def test_responses_that_ended_and_running_ones_are_texts_of_their_prompt_alone():
    index = index_of((1, 2, 3), (20, 21, 22, 23), (20, 21))
    assert index.draft(1, 4) == NO_DRAFT, "a running response is shared piece by piece"
    index.end(0)
    assert index.draft(1, 4) == Draft((22, 23), 5), "with the prompt, which is before both"
    index.start(7, (1, 2, 4))
    index.extend(7, (20, 21))
    assert index.draft(7, 4) == NO_DRAFT
    index.end(8)  # nobody started it


def test_a_running_response_is_shared_piece_by_piece_with_what_came_before():
    tokens = list(range(100, 100 + 2 * PIECE_TOKENS))
    index = index_of((1, 2, 3), ())
    for start in range(0, len(tokens), 16):
        index.extend(0, tokens[start : start + 16])
    index.start(1, (1, 2, 3))
    for end in (20, PIECE_TOKENS - 1, PIECE_TOKENS + 1):
        index.start(1, (1, 2, 3))
        index.extend(1, tokens[:end])
        assert index.draft(1, 7) == Draft(tuple(tokens[end : end + 7]), MOST_MATCHED), "no end of a piece cuts a draft"


def test_texts_are_bounded_and_the_oldest_go_first():
    index = DraftIndex(most_tokens=500, most_of_prompt=200)
    for number in range(60):
        index.start(number, (number % 9, 2, 3))
        index.extend(number, [1000 * (number % 9) + place for place in range(90)])
        index.end(number)
        assert index.tokens <= 500
    assert index.tokens == sum(map(len, index._earlier.values())) > 200
    assert all(len(text) <= 200 for text in index._earlier.values())
    for number, known in ((59, True), (52, False)):
        index.start(100, (number % 9, 2, 3))
        index.extend(100, [1000 * (number % 9) + place for place in range(40, 43)])
        assert bool(index.draft(100, 2).tokens) == known


def test_a_text_grows_and_drops_its_older_half():
    text, all_of_it = TokenText(most=100), []
    for number in range(40):
        part = list(range(number, number + 7))
        text.extend(part)
        all_of_it += part
        assert len(text) <= 100
        np.testing.assert_array_equal(text.tokens, all_of_it[-len(text) :])
    text.extend(list(range(300)))
    np.testing.assert_array_equal(text.tokens, range(250, 300))


def test_running_responses_can_be_dropped_and_earlier_ones_stay():
    index = index_of((1, 2, 3), (20, 21, 22, 23), (30, 31))
    index.end(0)
    index.clear_running()
    index.start(1, (1, 2, 3))
    index.extend(1, (20, 21))
    assert index.draft(1, 1).tokens == (22,)
