"""Random draws as a pure function of what is drawn: no generator, no state, no order.

A draw is a hash of (seed, sample index, absolute position, purpose, round) and, where a whole row is
drawn, of the token id. So it is the same alone and in a batch, after any history, with any number of
drafts, on any device. The hash is SplitMix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom
number generators"): its finaliser absorbs one word after another into a 64-bit key, and the key then
starts one SplitMix64 sequence per row, indexed by token id. All of it is wrap-around int64 arithmetic,
which has no rounding and thus no geometry.

Dims: N rows, V vocabulary.
"""

from enum import IntEnum

import torch

from outrider.ops.invariant import elementwise

__all__ = ["Purpose", "draw_keys", "gumbel", "mix64", "uniform"]


def _signed(word: int) -> int:
    """A 64-bit pattern as the int64 that torch stores."""
    return word - (1 << 64) if word >> 63 else word


GAMMA = _signed(0x9E3779B97F4A7C15)  # increment of SplitMix64: the odd integer next to 2^64 / golden ratio
MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = _signed(0x94D049BB133111EB)
BELOW_ONE = {torch.float32: 1 - 2.0**-24, torch.float64: 1 - 2.0**-53}


class Purpose(IntEnum):
    """What a draw is for. Two draws of one position that must be independent differ here."""

    SAMPLE = 0  # the target's own token; a drafter that imitates it draws with the same noise
    DRAFT = 1  # a draft from the drafter's own distribution
    ACCEPT = 2  # the coin that accepts or rejects such a draft
    RECOVER = 3  # the final token of a round that used these coins


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64, a bijection of int64; any shape."""
    x = (x ^ _shift_right(x, 30)) * MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def draw_keys(*words: torch.Tensor | int) -> torch.Tensor:
    """A 64-bit key from words, in order: int64 tensors that broadcast, or integers; the first is a tensor."""
    first, *others = words
    assert isinstance(first, torch.Tensor), "the first word of a key is a tensor"
    key = mix64(first + GAMMA)
    for word in others:
        key = mix64((key ^ word) + GAMMA)
    return key


def uniform(key_N: torch.Tensor) -> torch.Tensor:
    """One number of [0, 1) per key, float64 with 53 random bits; a key serves this or ``gumbel``, not both."""
    return _shift_right(mix64(key_N + GAMMA), 11).double() * 2.0**-53


def gumbel(key_N: torch.Tensor, token_ids_V: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Standard Gumbel noise ``-log(E)``, E exponential, per key and token id; ``[N, V]``.

    Uniforms have 63 random bits before they are rounded to ``dtype``, so that the large values, which
    decide a maximum over a vocabulary, keep the full relative precision of E near 0: float32 noise
    reaches 43.7 and has no ties to speak of.

    Args:
        key_N: int64.
        token_ids_V: int64, the columns; noise belongs to a token id, not to a column.
        dtype: float32 or float64.
    """
    bits_NV = mix64(key_N[:, None] + (token_ids_V + 1) * GAMMA)
    # Odd, hence never 0; rounding to dtype may give 1, whose logarithm below would be infinite.
    unit_NV = ((_shift_right(bits_NV, 1) | 1).to(dtype) * 2.0**-63).clamp_max(BELOW_ONE[dtype])
    exponential_NV = -elementwise(torch.log1p, -unit_NV)
    return -elementwise(torch.log, exponential_NV)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift; that of torch copies the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)
