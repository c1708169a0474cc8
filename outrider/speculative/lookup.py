"""What followed when the last tokens stood in the text before: drafts that cost no model.

One `TokenHistory` per sequence finds the longest earlier occurrence of its last tokens (as LZ77 does: a table of
pairs, and for each place the earlier place of the same pair) and reads on from there. A match goes on until a token
breaks it; then the next one is searched.

How far such drafts may be trusted is learnt from every committed token of the answer, whether or not a draft was
verified there: did it continue the match? So all of it is a function of the committed tokens, in whatever rounds
they came.
"""

from array import array
from collections.abc import Sequence

__all__ = ["TokenHistory"]

SHORTEST = 2  # tokens of a match
LONGEST = 16  # beyond which a match is not measured any further while it is searched
MOST_PLACES = 32  # looked at per search, the most recent first
# Matches of 2, 3, 4, 5, 6 to 7, and 8 and more tokens: how often the next token continues one. The shipped pair on
# three tiers of prompts, see docs/decisions; each counts as PRIOR_WEIGHT outcomes of a new sequence.
CLASSES = (0, 0, 0, 1, 2, 3, 4, 4)  # by length of the match; longer ones are the last class
PRIOR_RATES = (0.54, 0.6, 0.74, 0.76, 0.85, 0.95)
PRIOR_WEIGHT = 4.0
MEMORY = 0.97  # of earlier outcomes of a class, per outcome


class TokenHistory:
    """The committed tokens of one sequence, and where its last ones stood before.

    Memory is a table entry and two integers per token, about 110 bytes; `append` takes a microsecond or two while a
    match goes on and at most MOST_PLACES comparisons of LONGEST tokens otherwise.
    """

    __slots__ = ("_earlier", "_heads", "_hits", "_length", "_place", "_tokens", "_trials")

    def __init__(self) -> None:
        self._tokens = array("q")
        self._heads: dict[int, int] = {}  # pair, as one number -> the last place that follows it
        self._earlier = array("q")  # place -> the place before it that follows the same pair, or -1
        self._place = -1  # of the token that continues the match; -1 without one
        self._length = 0  # tokens of the match
        self._hits = [rate * PRIOR_WEIGHT for rate in PRIOR_RATES]
        self._trials = [PRIOR_WEIGHT] * len(PRIOR_RATES)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def match_length(self) -> int:
        """Last tokens that stood in the text before; 0 if fewer than SHORTEST did."""
        return self._length

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that say nothing about the answer: those of a prompt. Ends the match that was going on."""
        for token_id in token_ids:
            self._insert(token_id)
        self._place, self._length = self._search()

    def append(self, token_id: int) -> None:
        """Take in the next committed token of an answer, learn from it, and go on with the match or find another."""
        tokens, place = self._tokens, self._place
        is_hit = place >= 0 and tokens[place] == token_id
        if place >= 0:
            self._learn(self._length, is_hit)
        self._insert(token_id)
        if is_hit:
            self._place, self._length = place + 1, self._length + 1
        else:
            self._place, self._length = self._search()

    def drafts(self, count: int) -> list[int]:
        """The next tokens if the text goes on as it did before; beyond its end it repeats what was just drafted.

        There must be a match.
        """
        tokens, place = self._tokens, self._place
        drafts = tokens[place : place + count].tolist()
        period = len(tokens) - place
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def state(self) -> list[float]:
        """What does not follow from the tokens alone: the match that is going on, and what was learnt."""
        return [float(self._place), float(self._length), *self._hits, *self._trials]

    @classmethod
    def restored(cls, token_ids: Sequence[int], state: Sequence[float]) -> "TokenHistory":
        """The history of these tokens that had such a state."""
        history = cls()
        for token_id in token_ids:
            history._insert(token_id)
        place, length, *learnt = state
        history._place, history._length = int(place), int(length)
        history._hits, history._trials = learnt[: len(PRIOR_RATES)], learnt[len(PRIOR_RATES) :]
        return history

    def token_ids(self) -> list[int]:
        """All of them, oldest first."""
        return self._tokens.tolist()

    def confidence(self, count: int) -> list[float]:
        """Of each of the next drafts: the probability that it stands if all before it do; 0 without a match."""
        if self._place < 0:
            return [0.0] * count
        hits, trials = self._hits, self._trials
        rates = [hits[kind] / trials[kind] for kind in CLASSES[self._length : self._length + count]]
        return rates + [hits[-1] / trials[-1]] * (count - len(rates))

    def _insert(self, token_id: int) -> None:
        tokens = self._tokens
        place = len(tokens)
        earlier = -1
        if place >= SHORTEST:
            pair = tokens[-2] << 32 | tokens[-1]
            earlier = self._heads.get(pair, -1)
            self._heads[pair] = place
        tokens.append(token_id)
        self._earlier.append(earlier)

    def _learn(self, length: int, is_hit: bool) -> None:
        kind = CLASSES[length] if length < len(CLASSES) else -1
        self._hits[kind] = MEMORY * self._hits[kind] + is_hit
        self._trials[kind] = MEMORY * self._trials[kind] + 1

    def _search(self) -> tuple[int, int]:
        """Place after the longest earlier occurrence of the last tokens, the most recent of equals, and its length."""
        tokens, earlier = self._tokens, self._earlier
        if len(tokens) < SHORTEST:
            return -1, 0
        place = self._heads.get(tokens[-2] << 32 | tokens[-1], -1)
        best_place, best_length, num_left = -1, 0, MOST_PLACES
        while place >= 0 and num_left:
            limit = min(LONGEST, place)
            length = SHORTEST
            while length < limit and tokens[place - length - 1] == tokens[-length - 1]:
                length += 1
            if length > best_length:
                best_place, best_length = place, length
                if length == LONGEST:
                    break
            place = earlier[place]
            num_left -= 1
        return best_place, best_length
