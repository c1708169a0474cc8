"""Incremental detokenization against the batch decode, for every split."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import RequestError, TokenizerError
from outrider.tokenizer import IncrementalDetokenizer, load_tokenizer

FAST = settings(max_examples=150, deadline=None, derandomize=True)
# Weighted to bytes that start, continue and break UTF-8 sequences; ids 0..255 are single bytes (reversed).
BYTES = st.one_of(
    st.sampled_from([0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xF4, 0x90, 0xFF]),
    st.sampled_from(list(b"ab<")),
)
BYTE_IDS = BYTES.map(lambda byte: 255 - byte)
TOKEN_IDS = st.lists(st.one_of(BYTE_IDS, st.integers(0, 280)), max_size=24)
STOPS = st.lists(st.text(alphabet="ab<\u00e9\u20ac\ufffd", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="module")
def byte_tokenizer(tiktoken_folder):
    return load_tokenizer(tiktoken_folder)


def ids_of(text: str) -> list[int]:
    return [255 - byte for byte in text.encode()]


def split(token_ids, cuts):
    edges = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    return [token_ids[start:end] for start, end in pairwise(edges)]


def naive_cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Read the text one character at a time; at the first character that ends a stop, take the longest."""
    for end in range(1, len(text) + 1):
        hits = [item for item in stop if text[:end].endswith(item)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@FAST
@given(token_ids=TOKEN_IDS, cuts=st.lists(st.integers(0, 30), max_size=6), skip=st.booleans())
def test_any_split_equals_batch_decode(byte_tokenizer, token_ids, cuts, skip):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, skip_special=skip)
    pushed = [detokenizer.push(part) for part in split(token_ids, cuts)]
    tail = detokenizer.flush()
    assert "".join(pushed) + tail == byte_tokenizer.decode(token_ids, skip_special=skip)
    assert tail in ("", "\ufffd")
    assert detokenizer.num_emitted_tokens == detokenizer.num_tokens == len(token_ids)
    assert detokenizer.num_tokens_through_stop is None


@FAST
@given(token_ids=TOKEN_IDS, stop=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_stop_equals_naive_search_for_any_split(byte_tokenizer, token_ids, stop, cuts):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, stop)
    seen = ""
    for part in split(token_ids, cuts):
        seen += detokenizer.push(part)
        # Whatever is out must fit the final answer: nothing of a stop string ever leaks.
        assert naive_cut(byte_tokenizer.decode(token_ids), stop)[0].startswith(seen)
    seen += detokenizer.flush()
    assert (seen, detokenizer.matched_stop) == naive_cut(byte_tokenizer.decode(token_ids), stop)
    assert detokenizer.stopped == (detokenizer.matched_stop is not None)


@FAST
@given(token_ids=TOKEN_IDS, stop=STOPS)
def test_token_counts(byte_tokenizer, token_ids, stop):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, stop)
    text = detokenizer.push(token_ids)
    emitted_before_flush = detokenizer.num_emitted_tokens
    kept = byte_tokenizer.decode(token_ids[:emitted_before_flush])
    assert text.startswith(kept)
    if not detokenizer.stopped:
        return
    through = detokenizer.num_tokens_through_stop
    assert through == detokenizer.num_tokens
    assert text + detokenizer.matched_stop in byte_tokenizer.decode(token_ids[:through])
    one_less = IncrementalDetokenizer(byte_tokenizer, stop)
    one_less.push(token_ids[: through - 1])
    assert not one_less.stopped
    # Maximal: one token more would reach into the stop string.
    if emitted_before_flush < through:
        assert len(byte_tokenizer.decode(token_ids[: emitted_before_flush + 1])) > len(text)


def test_stop_across_tokens_holds_back_only_what_may_become_it(byte_tokenizer):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, ["lowlands"])
    pushes = [detokenizer.push([token]) for token in ids_of("slow lowlands!")]
    assert "".join(pushes) == "slow "
    assert pushes[:5] == ["s", "", "", "", "low "]
    assert detokenizer.matched_stop == "lowlands"
    assert detokenizer.num_tokens_through_stop == len("slow lowlands")
    assert detokenizer.num_emitted_tokens == len("slow ")
    assert detokenizer.push(ids_of("more")) == detokenizer.flush() == ""
    assert detokenizer.num_tokens_through_stop == len("slow lowlands")


def test_stop_inside_one_token(byte_tokenizer):
    hello = byte_tokenizer.encode("hello")
    detokenizer = IncrementalDetokenizer(byte_tokenizer, ["ell"])
    assert detokenizer.push([*hello, *ids_of("x")]) == "h"
    assert detokenizer.num_tokens_through_stop == 1
    assert detokenizer.num_emitted_tokens == 0


def test_first_completed_stop_wins_then_the_longest(byte_tokenizer):
    for stop in (["abcd", "bc", "abc"], ["bc", "abc", "abcd"]):
        detokenizer = IncrementalDetokenizer(byte_tokenizer, stop)
        assert detokenizer.push(ids_of("xabcd")) == "x"
        assert detokenizer.matched_stop == "abc"


def test_code_points_are_never_split(byte_tokenizer):
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    assert [detokenizer.push([token]) for token in ids_of("\U0001f600")] == ["", "", "", "\U0001f600"]
    assert detokenizer.push(ids_of("\u20ac")[:2]) == ""
    assert detokenizer.num_emitted_tokens == 4
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.num_emitted_tokens == 6


def test_flush_releases_a_partial_stop(byte_tokenizer):
    detokenizer = IncrementalDetokenizer(byte_tokenizer, ["END"])
    assert detokenizer.push(ids_of("the EN")) == "the "
    assert detokenizer.flush() == "EN"
    assert not detokenizer.stopped


def test_stop_is_not_matched_across_a_shown_special(byte_tokenizer):
    eos = byte_tokenizer.special_token_id("[EOS]")
    token_ids = [*ids_of("a"), eos, *ids_of("b")]
    shown = IncrementalDetokenizer(byte_tokenizer, ["ab"], skip_special=False)
    assert shown.push(token_ids) + shown.flush() == "a[EOS]b"
    hidden = IncrementalDetokenizer(byte_tokenizer, ["ab"])
    assert hidden.push(token_ids) == ""
    assert hidden.num_tokens_through_stop == 3


def test_ids_beyond_the_tokenizer_add_no_text(byte_tokenizer):
    """The vocabulary of a model may be padded; a stop string or code point may even span such ids."""
    euro, beyond = ids_of("\u20ac"), byte_tokenizer.vocab_size
    token_ids = [*ids_of("a"), beyond, *euro[:1], 100_000, *euro[1:], *ids_of("bc")]
    for show_hidden in (False, True):
        detokenizer = IncrementalDetokenizer(byte_tokenizer, skip_special=not show_hidden)
        assert detokenizer.push(token_ids) + detokenizer.flush() == "a\u20acbc"
        assert detokenizer.num_tokens == detokenizer.num_emitted_tokens == len(token_ids)
    stopping = IncrementalDetokenizer(byte_tokenizer, ["bc"])
    assert stopping.push([*token_ids[:-1], beyond, *ids_of("cd")]) == "a\u20ac"
    assert stopping.num_tokens_through_stop == len(token_ids) + 1
    for strict in (lambda: byte_tokenizer.decode([beyond]), lambda: byte_tokenizer.token_bytes(beyond)):
        with pytest.raises(TokenizerError, match="outside the table"):
            strict()


def test_bad_input_is_rejected(byte_tokenizer):
    with pytest.raises(RequestError, match="empty string"):
        IncrementalDetokenizer(byte_tokenizer, ["a", ""])
    with pytest.raises(RequestError, match="pass a list"):
        IncrementalDetokenizer(byte_tokenizer, "stop")
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    detokenizer.flush()
    with pytest.raises(AssertionError, match="after flush"):
        detokenizer.push([])


@FAST
@given(
    st.text(alphabet="ab<", max_size=14),
    st.lists(st.text(alphabet="ab<", min_size=1, max_size=3), max_size=2),
    st.integers(0, 9),
    st.integers(1, 4),
)
def test_stop_strings_completed_before_min_tokens_are_text(byte_tokenizer, text, stop, min_tokens, size):
    """One token per character: the stop that counts is the first that ends at character min_tokens or later."""
    ends = [end for end in range(max(1, min_tokens), len(text) + 1) if any(text[:end].endswith(item) for item in stop)]
    detokenizer = IncrementalDetokenizer(byte_tokenizer, stop, min_tokens=min_tokens)
    ids, pieces = ids_of(text), []
    for begin in range(0, len(ids), size):
        pieces.append(detokenizer.push(ids[begin : begin + size]))
    pieces.append(detokenizer.flush())
    if not ends:
        assert "".join(pieces) == text and not detokenizer.stopped
        return
    matched = max((item for item in stop if text[: ends[0]].endswith(item)), key=len)
    assert detokenizer.matched_stop == matched
    assert detokenizer.num_tokens == ends[0]
    assert "".join(pieces) == text[: ends[0] - len(matched)]
