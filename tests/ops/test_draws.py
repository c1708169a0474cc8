"""The hash behind every draw: published values, uniformity, and no trace of a neighbour."""

import math

import pytest
import torch

from outrider.ops.draws import GAMMA, Purpose, draw_keys, gumbel, mix64, uniform
from outrider.testing.statistics import chi_square_p_value, counts_of

NUM = 1 << 16
LIKELY = 1e-4  # seeds are fixed, so a test that passes once passes always


def test_the_mixer_is_splitmix64() -> None:
    """The first outputs of the reference generator seeded with 0 and with 1234567."""
    for seed, expected in (
        (0, (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)),
        (1234567, (6457827717110365317, 3203168211198807973, 9817491932198370423)),
    ):
        states = torch.tensor(seed) + torch.arange(1, 4) * GAMMA
        assert [value & (2**64 - 1) for value in mix64(states).tolist()] == list(expected)


def neighbours() -> dict[str, torch.Tensor]:
    """Keys along one word, the others fixed."""
    along, one = torch.arange(NUM), torch.ones(NUM, dtype=torch.int64)
    return {
        "seed": draw_keys(along, 0, 100, Purpose.SAMPLE),
        "sample": draw_keys(one, along, 100, Purpose.SAMPLE),
        "position": draw_keys(one, 0, along, Purpose.SAMPLE),
        "round": draw_keys(one, 0, along, 3, Purpose.ACCEPT),
    }


@pytest.mark.parametrize("word", ["seed", "sample", "position", "round"])
def test_draws_along_a_word_are_uniform_and_independent(word: str) -> None:
    keys = neighbours()[word]
    assert keys.unique().numel() == NUM
    numbers = uniform(keys)
    assert numbers.min() >= 0 and numbers.max() < 1
    cells = (numbers * 256).long()
    assert chi_square_p_value(counts_of(cells, 256), torch.ones(256)) > LIKELY
    low_bits = (numbers * 2**53).long() % 256
    assert chi_square_p_value(counts_of(low_bits, 256), torch.ones(256)) > LIKELY
    for lag in (1, 2, 7, 64):
        pairs = (numbers[:-lag] * 16).long() * 16 + (numbers[lag:] * 16).long()
        assert chi_square_p_value(counts_of(pairs, 256), torch.ones(256)) > LIKELY, lag
        correlation = torch.corrcoef(torch.stack((numbers[:-lag], numbers[lag:])))[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(NUM), lag


def test_purposes_and_token_ids_are_independent_of_each_other() -> None:
    seeds = torch.arange(NUM)
    by_purpose = [uniform(draw_keys(seeds, 0, 5, purpose)) for purpose in list(Purpose)[1:]]
    noise = gumbel(draw_keys(seeds, 0, 5, Purpose.SAMPLE), torch.arange(4), torch.float64)
    # exp(-exp(-g)) is uniform for standard Gumbel noise.
    columns = [*by_purpose, *torch.exp(-torch.exp(-noise)).unbind(1)]
    correlations = torch.corrcoef(torch.stack(columns))
    assert (correlations - torch.eye(7)).abs().max() < 4.5 / math.sqrt(NUM)


def test_one_bit_of_a_word_moves_half_of_the_key() -> None:
    seeds = draw_keys(torch.arange(512), 9)
    for word in range(3):
        for bit in (0, 1, 31, 52, 63):
            words = [seeds, seeds + 3, seeds * 5]
            before = draw_keys(*words)
            words[word] = words[word] ^ (1 << bit if bit < 63 else -(1 << 63))
            changed = before ^ draw_keys(*words)
            flipped = torch.stack([(changed >> position) & 1 for position in range(64)]).double()
            assert 31 < float(flipped.sum(0).mean()) < 33
            assert flipped.mean(1).sub(0.5).abs().max() < 0.13  # no bit of the key is left out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_noise_has_its_distribution(dtype: torch.dtype) -> None:
    noise = gumbel(draw_keys(torch.arange(1 << 12), 1), torch.arange(64), dtype).flatten()
    assert noise.dtype == dtype and noise.isfinite().all()
    cells = (torch.exp(-torch.exp(-noise.double())) * 1024).long()
    assert chi_square_p_value(counts_of(cells, 1024), torch.ones(1024)) > LIKELY
    # The tail decides a maximum over a vocabulary: P(g > 9) = 1.2e-4, and no two large values are equal.
    large = noise[noise > 9]
    assert 15 < large.numel() < 55
    assert large.unique().numel() == large.numel()


def test_gumbel_noise_belongs_to_the_token_not_to_the_column() -> None:
    keys = draw_keys(torch.arange(5), 1)
    everything = gumbel(keys, torch.arange(300), torch.float32)
    for chosen in (torch.tensor([299, 3, 17]), torch.arange(299, -1, -1), torch.tensor([8])):
        assert torch.equal(gumbel(keys, chosen, torch.float32), everything[:, chosen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 64, 97, 1031, 40000])
def test_gumbel_noise_of_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, width: int) -> None:
    keys, ids = draw_keys(torch.arange(9), 1), torch.arange(width)
    together = gumbel(keys, ids, dtype)
    for row in range(9):
        assert torch.equal(gumbel(keys[row : row + 1], ids, dtype)[0], together[row])
