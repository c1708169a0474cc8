"""Matches against a search through the whole text, and what is learnt from them."""

import random

import pytest

from outrider.speculative.lookup import LONGEST, MOST_PLACES, PRIOR_RATES, SHORTEST, TokenHistory


def longest_match(tokens):
    """Length and place of the longest earlier occurrence, among the last places that follow the last pair."""
    places = [
        place for place in range(len(tokens) - 1, SHORTEST - 1, -1) if tokens[place - SHORTEST : place] == tokens[-2:]
    ]
    best = (0, -1)
    for place in places[:MOST_PLACES]:
        length = SHORTEST
        while length < min(LONGEST, place) and tokens[place - length - 1] == tokens[-length - 1]:
            length += 1
        if length > best[0]:
            best = (length, place)
    return best


def random_text(dice, length, alphabet):
    """Random tokens with pieces of what came before, so that there are matches of all lengths."""
    tokens = []
    while len(tokens) < length:
        if len(tokens) > 4 and dice.random() < 0.3:
            begin = dice.randrange(len(tokens) - 2)
            tokens.extend(tokens[begin : begin + dice.randint(2, 24)])
        tokens.append(dice.randrange(alphabet))
    return tokens[:length]


@pytest.mark.parametrize("alphabet", [1, 2, 5, 50, 1000])
def test_a_prompt_ends_in_its_longest_match(alphabet):
    dice = random.Random(alphabet)
    matched = set()
    for _ in range(200):
        tokens = random_text(dice, dice.randint(0, 120), alphabet)
        history = TokenHistory()
        history.extend(tokens[: len(tokens) // 3])
        history.extend(tokens[len(tokens) // 3 :])
        length, place = longest_match(tokens)
        assert history.match_length == length
        if length:
            expected = list(tokens)
            for _ in range(7):
                expected.append(expected[place + len(expected) - len(tokens)])
            assert history.drafts(7) == expected[len(tokens) :]
            matched.add(length)
    assert len(matched) > (1 if alphabet == 1 else 3)


def test_a_match_goes_on_until_it_breaks_and_then_the_longest_is_searched():
    dice = random.Random(0)
    num_broken = num_continued = 0
    for _ in range(60):
        text = random_text(dice, 160, 6)
        history, tokens = TokenHistory(), text[:20]
        history.extend(tokens)
        for token_id in text[20:]:
            before, expected = history.match_length, history.drafts(1) if history.match_length else []
            history.append(token_id)
            tokens.append(token_id)
            if expected == [token_id]:
                assert history.match_length == before + 1
                num_continued += 1
            else:
                assert history.match_length == longest_match(tokens)[0]
                num_broken += 1
            assert len(history) == len(tokens) and history.token_ids() == tokens
    assert num_broken > 500 and num_continued > 500


def test_drafts_beyond_the_end_repeat_what_was_just_drafted():
    history = TokenHistory()
    history.extend([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert history.drafts(8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_nothing_that_stood_before_is_no_match():
    history = TokenHistory()
    assert history.match_length == 0 and history.confidence(3) == [0.0] * 3
    history.extend([1, 2, 3, 2, 1])
    assert history.match_length == 0
    history.append(2)
    assert history.match_length == 2 and history.drafts(2) == [3, 2]


def test_confidence_starts_at_the_prior_and_grows_with_the_match():
    history = TokenHistory()
    history.extend([1, 2, *range(10, 30), 1, 2])
    assert history.confidence(8) == pytest.approx([PRIOR_RATES[i] for i in (0, 1, 2, 3, 4, 4, 5, 5)])
    for token_id in range(10, 18):
        history.append(token_id)
    assert all(confidence > PRIOR_RATES[-1] for confidence in history.confidence(8))


def test_matches_that_mislead_lose_their_credit_and_the_prompt_says_nothing():
    dice = random.Random(1)
    text = [token for _ in range(40) for token in (1, 2, dice.randrange(10, 1000))]
    read, answered = TokenHistory(), TokenHistory()
    read.extend([*text, 1, 2])
    for token_id in [*text, 1, 2]:
        answered.append(token_id)
    assert read.confidence(1) == pytest.approx([PRIOR_RATES[0]])
    assert answered.confidence(1)[0] < 0.15


def test_a_restored_history_goes_on_as_the_first_one():
    dice = random.Random(2)
    for _ in range(30):
        text = random_text(dice, 120, 7)
        begin, cut = dice.randrange(60), dice.randrange(60, 100)
        whole = TokenHistory()
        whole.extend(text[:begin])
        for token_id in text[begin:cut]:
            whole.append(token_id)
        copy = TokenHistory.restored(whole.token_ids(), whole.state())
        for token_id in text[cut:]:
            for history in (whole, copy):
                history.append(token_id)
            assert copy.state() == whole.state()
            assert not whole.match_length or copy.drafts(5) == whole.drafts(5)
