"""Packing is invisible: what goes in comes out, and a token's neighbours in a row do not matter."""

from typing import Any

import numpy as np
import pytest
from packed_arrays import PackedArrays

from jaxrlhf.batch import Sequences
from jaxrlhf.batching import shared_prompts
from jaxrlhf.batching.attention_rows import AttentionPlaces, place
from jaxrlhf.batching.microbatch import microbatch_shape_of, sizes_of
from jaxrlhf.batching.ragged import MinibatchRows, RaggedBatch
from jaxrlhf.batching.shared_prompts import units_of


def apart(length_B: np.ndarray, width: int) -> Sequences:
    """Sequences of these lengths that have nothing in common."""
    rows = len(length_B)
    token_BT = np.random.default_rng(9).integers(1, 1000, (rows, width), dtype=np.int32)
    return Sequences(token_BT, length_B, np.ones((rows, width), bool), np.arange(rows))


def shared_prefixes(sequences: Sequences) -> np.ndarray:
    return shared_prompts.shared_prefixes(RaggedBatch.of(sequences))


def random_lengths(seed: int, *, count: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, width + 1, count).astype(np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_rows_hold_every_sequence_once_and_never_overflow(seed: int) -> None:
    length_B = random_lengths(seed, count=50, width=20)
    _, row_B, offset_B = place(length_B, [32])
    taken = np.zeros((row_B.max() + 1, 32), int)
    for row, offset, length in zip(row_B, offset_B, length_B, strict=True):
        taken[row, offset : offset + length] += 1
        assert offset + length <= 32
    assert taken.max() == 1
    assert taken.sum() == length_B.sum()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_pack_and_unpack_are_inverse(rows: int) -> None:
    length_B = random_lengths(0, count=30, width=16)
    inside_BT = np.arange(16) < length_B[:, None]
    value_BT = np.where(inside_BT, np.random.default_rng(1).normal(size=(30, 16)), 0.0)
    packing = PackedArrays(apart(length_B, 16), rows=rows, row_tokens=24)
    packed = packing.pack(value_BT)
    assert packed.shape[0] == packing.microbatches and rows >= packed.shape[1] and packed.shape[2] == 24
    np.testing.assert_array_equal(packing.unpack(packed), value_BT)


def test_positions_and_segments_follow_the_sequences() -> None:
    length_B = np.array([5, 3, 4], np.int32)
    token_BT = np.arange(1, 19, dtype=np.int32).reshape(3, 6) * (np.arange(6) < length_B[:, None])
    sequences = Sequences(token_BT, length_B, token_BT > 0, np.arange(3))
    (rows,) = PackedArrays(sequences, rows=2, row_tokens=8).rows()
    assert rows.shared_prefix is None
    for row in range(2):
        for segment in range(1, rows.segment_RW[row].max() + 1):
            (where,) = np.nonzero(rows.segment_RW[row] == segment)
            np.testing.assert_array_equal(rows.position_RW[row, where], np.arange(len(where)))
            assert list(rows.token_RW[row, where]) in [list(t[:n]) for t, n in zip(token_BT, length_B, strict=True)]
    assert sum(row.max() for row in rows.segment_RW) == 3


def groups(seed: int, *, prompts: int, responses: int, width: int) -> Sequences:
    """Responses to prompts, which are longer, in random order."""
    draw = np.random.default_rng(seed)
    rows = prompts * responses
    token_BT, mask_BT = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    length_B = np.zeros(rows, np.int32)
    for prompt in range(prompts):
        tokens = draw.integers(1, 50, draw.integers(width // 4, width // 2))
        for b in range(prompt * responses, (prompt + 1) * responses):
            answer = draw.integers(1, 50, draw.integers(1, width // 3))
            length_B[b] = len(tokens) + len(answer)
            token_BT[b, : length_B[b]] = np.concatenate([tokens, answer])
            mask_BT[b, len(tokens) : length_B[b]] = True
    order = draw.permutation(rows)
    prompt_id_B = np.repeat(1000 + np.arange(prompts), responses)
    return Sequences(token_BT[order], length_B[order], mask_BT[order], prompt_id_B[order])


@pytest.mark.parametrize("seed", range(4))
def test_what_a_prompt_has_in_common_ends_before_the_token_that_predicts_its_responses(seed: int) -> None:
    sequences = groups(seed, prompts=5, responses=4, width=40)
    for b, shared in enumerate(shared_prefixes(sequences)):
        same = np.flatnonzero(sequences.prompt_id_B == sequences.prompt_id_B[b])
        assert shared == sequences.mask_BT[b].argmax() - 1
        assert (sequences.token_BT[same, :shared] == sequences.token_BT[b, :shared]).all()
    assert not shared_prefixes(groups(seed, prompts=20, responses=1, width=40)).any()


def test_prompts_that_differ_have_in_common_what_is_before_the_difference() -> None:
    sequences = groups(1, prompts=1, responses=3, width=60)
    shared = shared_prefixes(sequences)[0]
    assert shared > 2
    sequences.token_BT[1, shared - 2] += 1
    assert list(shared_prefixes(sequences)) == [shared - 2] * 3
    sequences.mask_BT[2, 1] = True  # trained on from there: its own copy begins one before
    assert list(shared_prefixes(sequences)) == [0] * 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("merged", [1, 2, 4])
def test_a_row_holds_a_prompt_once_and_attention_sees_every_sequence_whole(seed: int, merged: int) -> None:
    sequences = groups(seed, prompts=6, responses=5, width=32)
    packing = PackedArrays(sequences, rows=merged, row_tokens=40, devices=4 // merged)
    plain = PackedArrays(apart_of(sequences), rows=merged, row_tokens=40, devices=4 // merged)
    batches = list(packing.rows())
    seen = []
    for rows in batches:
        assert rows.token_RW.shape[0] == 4 // merged and rows.shared_prefix is not None
        assert rows.token_RW.shape[1] in (40 * merged, 128)
        for row, (token_W, position_W, segment_W) in enumerate(
            zip(rows.token_RW, rows.position_RW, rows.segment_RW, strict=True)
        ):
            told = np.zeros(len(token_W), int)
            for part in rows.shared_prefix.parts:
                source_AS, segment_AS = part.source_RAS[row], part.segment_RAS[row]
                assert not segment_AS[part.used_R[row] :].any() and segment_AS[: part.used_R[row]].any(axis=1).all()
                for source_S, spread_S in zip(source_AS, segment_AS, strict=True):
                    for segment in range(1, spread_S.max() + 1):
                        (where,) = np.nonzero(spread_S == segment)
                        if len(where):
                            np.testing.assert_array_equal(position_W[source_S[where]], np.arange(len(where)))
                            assert (np.diff(where) == 1).all()
                            seen.append(tuple(token_W[source_S[where]]))
                assert not part.is_primary_RAS[row][segment_AS == 0].any()
                np.add.at(told, source_AS[part.is_primary_RAS[row]], 1)
            np.testing.assert_array_equal(told, segment_W > 0)
    whole = [tuple(t[:n]) for t, n in zip(sequences.token_BT, sequences.length_B, strict=True)]
    assert sorted(seen) == sorted(whole)
    packed, alone = (sum(int((rows.segment_RW > 0).sum()) for rows in p.rows()) for p in (packing, plain))
    assert alone == sequences.length_B.sum() > packed >= alone - (shared_prefixes(sequences) * 4 / 5).sum()
    inside_BT = np.arange(32) < sequences.length_B[:, None]
    np.testing.assert_array_equal(packing.unpack(packing.pack(sequences.token_BT)), sequences.token_BT)
    np.testing.assert_array_equal(packing.unpack(packing.pack(sequences.mask_BT)), sequences.mask_BT & inside_BT)
    # Each trained token is in one place, and right behind the token that it follows.
    trained = sum(int(rows.mask_RW.sum()) for rows in batches)
    assert trained == sequences.mask_BT.sum()
    before_BT = np.pad(sequences.token_BT, ((0, 0), (1, 0)))[:, :-1]
    rolled = [np.roll(rows.token_RW, 1, axis=1) for rows in batches]
    found_BT = packing.unpack(rolled)
    np.testing.assert_array_equal(found_BT[sequences.mask_BT], before_BT[sequences.mask_BT])


def test_every_token_is_placed_in_one_microbatch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    spread = AttentionPlaces.shared_prefix

    def counted(self, rows, token, *others):
        looked_at.append(len(token[0]))
        return spread(self, rows, token, *others)

    monkeypatch.setattr(AttentionPlaces, "shared_prefix", counted)
    sequences = groups(0, prompts=40, responses=5, width=32)
    assert len(list(PackedArrays(sequences, rows=2, row_tokens=40).rows())) == len(looked_at) > 10
    assert sum(looked_at) == sequences.length_B.sum()  # not so many in each microbatch


def apart_of(sequences: Sequences) -> Sequences:
    """Return the sequences with a separate prompt each."""
    return Sequences(sequences.token_BT, sequences.length_B, sequences.mask_BT, np.arange(len(sequences.length_B)))


def shares(sequences: Sequences) -> bool:
    return next(PackedArrays(sequences, rows=4, row_tokens=200).rows()).shared_prefix is not None


def test_prompts_are_shared_where_that_is_worth_it() -> None:
    assert shares(groups(0, prompts=4, responses=2, width=200))
    some = groups(0, prompts=6, responses=2, width=200)
    odd = Sequences(some.token_BT[:9], some.length_B[:9], some.mask_BT[:9], np.array([0, 0, 1, 1, 2, 3, 4, 5, 6]))
    assert not shares(odd)  # less than two responses to a prompt
    few = groups(0, prompts=4, responses=2, width=200)
    few.mask_BT[:, 4:] |= np.arange(4, 200) < few.length_B[:, None]
    assert shared_prefixes(few).any() and not shares(few)  # three tokens in common


@pytest.mark.parametrize("devices", [1, 2])
def test_a_last_microbatch_of_few_tokens_takes_a_smaller_program(devices: int) -> None:
    """Prompts of 100 tokens with four responses of 60 are 343 tokens each, and a row holds two of them."""
    prompt, response, count = 100, 60, 2 * devices + 1
    mask_BT = np.zeros((4 * count, 160), bool)
    mask_BT[:, prompt:] = True
    token_BT = np.arange(4 * count * 160, dtype=np.int32).reshape(4 * count, 160) + 1
    token_BT[:, :prompt] = np.repeat(token_BT[::4, :prompt], 4, axis=0)
    ids_B = np.repeat(np.arange(count), 4)
    sequences = Sequences(token_BT, np.full(4 * count, prompt + response, np.int32), mask_BT, ids_B)
    sizes: dict[str, Any] = {"rows": 6, "row_tokens": 160, "longest_response": response, "devices": devices}
    packing = PackedArrays(sequences, **sizes)
    batches = list(packing.rows())
    widths = [rows.token_RW.shape for rows in batches]
    assert widths[0][0] == widths[1][0] == devices and 686 <= widths[0][1] <= 768 and 343 <= widths[1][1] <= 384
    parts = [packing.trim(part, index) for index, part in enumerate(packing.pack(token_BT))]
    for rows, part in zip(batches, parts, strict=True):
        np.testing.assert_array_equal(rows.token_RW, part)
    np.testing.assert_array_equal(packing.unpack(parts), token_BT)
    assert sum(int(rows.mask_RW.sum()) for rows in batches) == mask_BT.sum()
    # Another process needs whole rows in every microbatch.
    whole = PackedArrays(sequences, **sizes, agree=lambda own: own + 1000 if own.ndim == 2 else own)
    assert [rows.token_RW.shape for rows in whole.rows()] == [widths[0]] * 2
    # A further program for the last of seven or eight microbatches saves too little.
    many = (np.tile(each, (5, *[1] * (each.ndim - 1))) for each in (token_BT, sequences.length_B, mask_BT))
    most = PackedArrays(Sequences(*many, np.repeat(np.arange(5 * count), 4)), **sizes)
    assert {rows.token_RW.shape for rows in most.rows()} == {widths[0]} and most.microbatches > 6


@pytest.mark.parametrize(
    ("tokens", "others_need", "width"), [(3900, [], 800), (2500, [6, 5], 640), (2500, [6, 6, 6], 800)]
)
def test_processes_agree_on_one_shape(tokens: int, others_need: list[int], width: int) -> None:
    alone = apart_of(groups(3, prompts=3, responses=2, width=400))
    # Another process shares prompts, needs five of the largest microbatches for its tokens, some number of the smaller
    # ones, whole rows in each, and 33 narrow attention rows in one of them.
    used, attends = np.array([[1, width]] * 5), np.array([33, 0])
    told = [np.array([0, 0, 1]), np.array(5), np.array(tokens), *map(np.array, others_need), used, attends]
    theirs = iter(told)
    packing = PackedArrays(alone, rows=2, row_tokens=400, agree=lambda own: np.maximum(own, next(theirs)))
    batches = list(packing.rows())
    assert [rows.token_RW.shape for rows in batches] == [(1, width)] * 5
    for rows in batches:
        assert rows.shared_prefix is not None
        assert [part.source_RAS.shape[0::2] for part in rows.shared_prefix.parts] == [(1, 200), (1, 400)]
        assert rows.shared_prefix.parts[0].source_RAS.shape[1] >= 33
    assert packing.pack(alone.token_BT).shape == (5, 1, width)
    assert next(theirs, None) is None


def test_short_sequences_are_attended_to_in_narrow_rows_unless_a_wide_one_has_a_gap() -> None:
    sequences = groups(5, prompts=40, responses=4, width=400)
    for rows in PackedArrays(sequences, rows=4, row_tokens=400).rows():
        assert rows.shared_prefix is not None
        narrow, wide = rows.shared_prefix.parts
        assert (narrow.source_RAS.shape[2], wide.source_RAS.shape[2]) == (200, 400)
        filled = []  # width, tokens, first sequence
        for part in (narrow, wide):
            for segment_S in part.segment_RAS[0, : part.used_R[0]]:
                filled.append((len(segment_S), int((segment_S > 0).sum()), int((segment_S == segment_S[0]).sum())))
        assert all((first > 200) == (width == 400) for width, _, first in filled)
        for width, taken, first in filled:
            assert all(later > width - taken for _, _, later in filled if later < first)


def test_what_attention_is_compiled_for_does_not_follow_the_lengths() -> None:
    attention_rows: dict[int, int] = {}
    for seed in range(1, 9):
        sequences = groups(seed, prompts=6, responses=4, width=90)
        for rows in PackedArrays(sequences, rows=4, row_tokens=90, attention_rows=attention_rows).rows():
            assert rows.shared_prefix is not None
            assert [part.source_RAS.shape for part in rows.shared_prefix.parts] == [(1, 16, 90)]
    alike = groups(1, prompts=6, responses=4, width=90)
    even = Sequences(alike.token_BT, np.full(24, 46, np.int32), alike.mask_BT, alike.prompt_id_B)
    for rows in PackedArrays(even, rows=4, row_tokens=90, attention_rows=attention_rows).rows():
        assert rows.shared_prefix is not None and [part.source_RAS.shape for part in rows.shared_prefix.parts] == [
            (1, 16, 90)
        ]
    many = groups(1, prompts=1, responses=80, width=90)
    short = Sequences(many.token_BT, many.mask_BT.argmax(axis=1) + 1, many.mask_BT, many.prompt_id_B)
    short.length_B[0] += 1
    list(PackedArrays(short, rows=4, row_tokens=90, attention_rows=attention_rows).rows())
    assert attention_rows[90] in (32, 64)
    before = dict(attention_rows)
    list(PackedArrays(sequences, rows=4, row_tokens=90, attention_rows=attention_rows).rows())
    assert attention_rows == before


@pytest.mark.parametrize(
    ("count", "rows"), [(1, [2]), (4, [4]), (5, [6]), (8, [8]), (9, [10]), (17, [10, 8]), (33, [12, 12, 12])]
)
def test_a_small_batch_is_not_padded_to_the_largest_microbatch(count: int, rows: list[int]) -> None:
    """Nor a last microbatch of 7 rows to the first of 10, as two of 20 rows are a tenth."""
    alone = apart(np.full(count, 20, np.int32), 20)
    assert [len(packed.token_RW) for packed in PackedArrays(alone, rows=16, row_tokens=20).rows()] == rows


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 9, 33, 100])
def test_rows_of_short_sequences_are_the_least_eighth_that_holds_them(count: int, seed: int) -> None:
    short = apart(random_lengths(seed, count=count, width=7), 20)
    full = PackedArrays(apart(np.full(count, 20, np.int32), 20), rows=16, row_tokens=20)
    packing = PackedArrays(short, rows=16, row_tokens=20)
    batches, largest = list(packing.rows()), len(next(full.rows()).token_RW)
    filled = place(short.length_B, [20])[1].max() + 1
    assert len(batches) == -(-filled // largest) <= full.microbatches
    eighths = range(2, 17, 2)
    assert len(batches[0].token_RW) == next(rows for rows in eighths if rows * len(batches) >= filled)


@pytest.mark.parametrize("seed", range(4))
def test_a_row_of_shared_prompts_is_the_least_size_that_needs_no_further_microbatch(seed: int) -> None:
    sequences = groups(seed, prompts=12, responses=8, width=300)
    how = {"longest": 300, "stages": 1, "shares": True}
    largest = microbatch_shape_of(6, 300, sequences=96, prompts=12, longest_response=100, **how)
    widths = [size.row_tokens for size in sizes_of(largest, 6, **how)]
    packing = PackedArrays(sequences, rows=6, row_tokens=300, longest_response=100)
    width = next(packing.rows()).token_RW.shape[1]
    assert widths == sorted({*widths}) and widths[-1] == largest.row_tokens and len(widths) <= 8 and width in widths

    def microbatches(width: int) -> int:
        prompt = shared_prefixes(sequences)
        units = units_of(sequences.length_B, prompt, sequences.prompt_id_B, row_tokens=width)
        total = [prompt[unit[0]] + (sequences.length_B - prompt)[unit].sum() for unit in units]
        return place(np.array(total), [width])[1].max() + 1

    assert packing.microbatches == microbatches(largest.row_tokens) == microbatches(width)
    assert all(microbatches(each) > packing.microbatches for each in widths if each < width)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_sequences_that_a_loss_compares_are_in_one_row(stages: int, shares: bool) -> None:
    rng, pairs, width = np.random.default_rng(3), 40, 32
    token_BT = rng.integers(1, 1000, (2 * pairs, width), dtype=np.int32)
    token_BT[1::2, :12] = token_BT[::2, :12]  # the prompt
    length_B = rng.integers(14, width + 1, 2 * pairs).astype(np.int32)
    mask_BT = (np.arange(width) >= 12) & (np.arange(width) < length_B[:, None])
    # A pair may be in a batch twice.
    prompt_id_B = np.repeat(np.arange(pairs) // 2 * 2, 2)
    sequences = Sequences(token_BT, length_B, mask_BT, prompt_id_B)
    how = {"rows": 6, "row_tokens": 2 * width, "longest_response": width - 12, "stages": stages, "shares": shares}
    for together, apart_pairs in ((2, 0), (1, None)):
        packing = PackedArrays(sequences, together=together, **how)
        pair_MRW = packing.pack(np.where(mask_BT, 1 + np.arange(2 * pairs)[:, None] // 2, 0))
        rows_of = [np.flatnonzero((pair_MRW == pair).any(axis=2).ravel()) for pair in range(1, pairs + 1)]
        split = sum(len(rows) > 1 for rows in rows_of)
        assert split == 0 if apart_pairs == 0 else split > 0
        np.testing.assert_array_equal(packing.unpack(packing.pack(mask_BT)), mask_BT)


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit a row of 8"):
        place(np.array([9]), [4, 8])


def test_a_microbatch_is_no_longer_than_its_prompts_and_the_longest_responses_to_them() -> None:
    sequences, width = groups(0, prompts=2, responses=4, width=120), {}
    for longest_response in (None, 40, 119):
        how = {"longest": 120, "stages": 1, "shares": True, "longest_response": longest_response}
        width[longest_response] = microbatch_shape_of(40, 240, sequences=8, prompts=2, **how).row_tokens
        packing = PackedArrays(sequences, rows=40, row_tokens=240, longest_response=longest_response)
        (rows,) = packing.rows()
        assert rows.token_RW.shape[1] <= width[longest_response]
        np.testing.assert_array_equal(packing.unpack(packing.pack(sequences.token_BT)), sequences.token_BT)
    # Two prompts of at most 79 tokens, whose last token each of eight responses has for itself, in whole 64s.
    assert width == {None: 1200, 40: 512, 119: 960}


def test_minibatches_of_one_batch_have_rows_of_the_same_sizes_however_many_prompts_they_are_of() -> None:
    sequences, rng = groups(0, prompts=16, responses=8, width=120), np.random.default_rng(0)
    rows = [row for _ in range(3) for row in rng.permutation(128).reshape(4, 32)]
    weights = [np.zeros((32, 120), np.float32)] * len(rows)
    widths: dict[bool, set[int]] = {True: set(), False: set()}
    for batch in MinibatchRows.of(sequences, {}, rows, weights, coefficients={}).part(0, 1):
        for told, seen in widths.items():
            prompts = batch.prompts if told else None
            packing = PackedArrays(batch.sequences, rows=40, row_tokens=240, longest_response=40, prompts=prompts)
            packed = packing.pack(batch.sequences.token_BT)
            np.testing.assert_array_equal(packing.unpack(packed), batch.sequences.token_BT)
            assert next(packing.rows()).shared_prefix is not None
            seen.add(packed.shape[2])
    how = {"longest": 120, "stages": 1, "shares": True}
    largest = microbatch_shape_of(40, 240, sequences=32, prompts=16, longest_response=40, **how)
    assert widths[True] <= {size.row_tokens for size in sizes_of(largest, 40, **how)}
    assert not widths[False] <= {size.row_tokens for size in sizes_of(largest, 40, **how)}
