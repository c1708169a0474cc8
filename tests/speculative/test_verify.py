import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.speculative.verify import verify_greedy


def literal(logits, drafts, lengths):
    """The definition, row by row."""
    outputs, accepted, row = [], [], 0
    for sequence, length in enumerate(lengths):
        output = []
        for i in range(length + 1):
            scores = logits[row + i].tolist()
            output.append(scores.index(max(scores)))
            if i == length or output[-1] != drafts[sequence][i]:
                break
        outputs.append(output)
        accepted.append(len(output) - 1)
        row += length + 1
    return outputs, accepted


def padded(outputs, width):
    return [output + [-1] * (width - len(output)) for output in outputs]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_the_definition_on_ragged_spans(data):
    num_drafts = data.draw(st.integers(0, 4))
    lengths = data.draw(st.lists(st.integers(0, num_drafts), min_size=1, max_size=5))
    rows = sum(lengths) + len(lengths)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    # Three values over five ids: many ties, and drafts from two ids are accepted often.
    logits = torch.randint(0, 3, (rows, 5), generator=generator).to(torch.float32)
    drafts = torch.randint(0, 2, (len(lengths), num_drafts), generator=generator)
    result = verify_greedy(logits, drafts, torch.tensor(lengths))
    outputs, accepted = literal(logits, drafts.tolist(), lengths)
    assert result.num_accepted_S.tolist() == accepted
    assert result.output_token_ids_SG1.tolist() == padded(outputs, num_drafts + 1)


@pytest.mark.parametrize("cut", range(5))
def test_oracle_drafts_corrupted_at_c_accept_exactly_c(cut):
    truth = torch.tensor([3, 1, 4, 1, 5])
    drafts = truth[None, :4].clone()
    if cut < 4:
        drafts[0, cut] ^= 1
    result = verify_greedy(torch.eye(6)[truth], drafts, torch.tensor([4]))
    assert result.num_accepted_S.tolist() == [cut]
    assert result.output_token_ids_SG1.tolist() == padded([truth[: cut + 1].tolist()], 5)


def test_later_agreement_after_a_rejection_does_not_count():
    truth = torch.tensor([3, 1, 4])
    result = verify_greedy(torch.eye(6)[truth], torch.tensor([[0, 1]]), torch.tensor([2]))
    assert result.num_accepted_S.tolist() == [0]


def test_content_beyond_the_length_is_ignored():
    logits = torch.eye(6)[torch.tensor([2, 3, 5])]  # spans of 1 and 2 rows
    for rest in (0, 2, 3, 5, -7):
        drafts = torch.tensor([[rest, rest], [3, rest]])
        result = verify_greedy(logits, drafts, torch.tensor([0, 1]))
        assert result.num_accepted_S.tolist() == [0, 1]
        assert result.output_token_ids_SG1.tolist() == [[2, -1, -1], [3, 5, -1]]


def test_no_sequences_and_no_drafts():
    empty = verify_greedy(torch.zeros(0, 4), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert empty.output_token_ids_SG1.shape == (0, 4)
    plain = verify_greedy(torch.eye(4)[[2, 0]], torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert plain.output_token_ids_SG1.tolist() == [[2], [0]]
