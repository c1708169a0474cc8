"""Native acceptance against the torch form."""

import pytest
import torch

from outrider.ops.native.match import GreedyMatch
from outrider.ops.select import argmax_lowest
from outrider.speculative.verify import verify_greedy, verify_matching


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("num_sequences", [1, 2, 9])
def test_equals_the_torch_form(native, num_sequences, num_drafts):
    generator = torch.Generator().manual_seed(num_drafts)
    for _ in range(20):
        lengths_S = torch.randint(0, num_drafts + 1, (num_sequences,), generator=generator)
        num_rows = int((lengths_S + 1).sum())
        winners_N = torch.randint(0, 2, (num_rows,), generator=generator)  # agreement is common
        drafts_SG = torch.randint(0, 2, (num_sequences, num_drafts), generator=generator)
        for s, length in enumerate(lengths_S.tolist()):
            drafts_SG[s, length:] = -7  # ignored, whatever it holds
        ours = verify_matching(winners_N, drafts_SG, lengths_S, native)
        plain = verify_matching(winners_N, drafts_SG, lengths_S)
        assert torch.equal(ours.output_token_ids_SG1, plain.output_token_ids_SG1)
        assert torch.equal(ours.num_accepted_S, plain.num_accepted_S)
        assert ours.num_accepted_S.dtype == torch.int64


def test_strided_drafts(native):
    block = torch.tensor([[1, 9, 2], [3, 9, 4]])
    winners_N, lengths_S = torch.tensor([1, 2, 5, 3, 8, 6]), torch.tensor([2, 2])
    result = verify_matching(winners_N, block[:, ::2], lengths_S, native)
    assert result.output_token_ids_SG1.tolist() == [[1, 2, 5], [3, 8, -1]]
    assert result.num_accepted_S.tolist() == [2, 1]
    nobody = verify_matching(winners_N[:0], block[:0, ::2], lengths_S[:0], native)
    assert nobody.output_token_ids_SG1.shape == (0, 3) and nobody.num_accepted_S.shape == (0,)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("num_sequences", [0, 1, 2, 9])
def test_straight_from_logits_it_is_what_verify_greedy_gives(native, threads, num_sequences, num_drafts):
    generator = torch.Generator().manual_seed(100 * num_drafts + num_sequences)
    match = GreedyMatch(native, max_sequences=9, num_drafts=num_drafts)
    for turn in range(20):
        lengths_S = torch.randint(0, num_drafts + 1, (num_sequences,), generator=generator)
        num_rows = int((lengths_S + 1).sum())
        # Three values over 37 ids: ties everywhere. Columns behind them belong to nobody.
        logits_NV = torch.randint(0, 3, (num_rows, 40), generator=generator).bfloat16()
        logits_NV[:, 37:] = 9
        logits_NV = logits_NV[:, :37]
        if turn % 4 == 0 and num_rows:
            logits_NV[turn % num_rows, 20] = torch.nan  # gives V, which no draft equals
        block_rows = torch.randperm(num_sequences + 1, generator=generator)[:num_sequences]
        drafts_BG = torch.full((num_sequences + 1, num_drafts), -7)  # ignored at and beyond a length
        winners, row = argmax_lowest(logits_NV.float()).tolist(), 0
        for place, length in zip(block_rows.tolist(), lengths_S.tolist(), strict=True):
            drafts_BG[place, :length] = torch.tensor(winners[row : row + length], dtype=torch.int64)
            if length > 1 and turn % 3:
                drafts_BG[place, turn % length] = 36 - turn
            row += 1 + length
        ours = match(logits_NV, drafts_BG, block_rows.tolist(), lengths_S.tolist())
        committed = match.num_committed(num_sequences).tolist()
        plain = verify_greedy(logits_NV.float(), drafts_BG[block_rows], lengths_S)
        assert committed == (plain.num_accepted_S + 1).tolist()
        padded = [list(tokens) + [-1] * (num_drafts + 1 - len(tokens)) for tokens in ours]
        assert padded == plain.output_token_ids_SG1.tolist()


def test_rows_and_lengths_must_agree(native):
    match = GreedyMatch(native, max_sequences=2, num_drafts=2)
    with pytest.raises(AssertionError, match="3 rows of logits for drafts of lengths"):
        match(torch.zeros(3, 8).bfloat16(), torch.zeros(1, 2, dtype=torch.int64), (0,), (1,))
