"""Native acceptance against the torch form."""

import pytest
import torch

from outrider.speculative.verify import verify_matching


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
