"""How drafts are drawn, and that what is handed over is what they were drawn from."""

import pytest
import torch

from outrider.batch import DraftSampling, Truncation
from outrider.models.dspark.drawing import DraftDraws
from outrider.ops.draws import Purpose, draw_keys
from outrider.ops.sampling import draw, softmax, tempered, truncate
from outrider.ops.select import first_maximum
from outrider.testing.statistics import chi_square_p_value, counts_of

VOCAB = 9
KEPT = torch.tensor([1, 2, 5, 8])  # target ids of a reduced draft vocabulary


def sampling_of(
    num: int,
    *,
    coins: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    temperature: float = 0.8,
    top_p: float | None = None,
) -> DraftSampling:
    none = torch.zeros(num, dtype=torch.bool)
    coins = none if coins is None else coins
    return DraftSampling(
        seed_S=torch.arange(num) * 3,
        sample_S=torch.arange(num) % 2,
        temperature_S=torch.full((num,), temperature, dtype=torch.float64),
        greedy_S=none if greedy is None else greedy,
        coins_S=coins,
        hands_over=bool(coins.any()),
        draws=greedy is None or not bool(greedy.all()),
        truncation=Truncation(
            top_k_S=None,
            largest_k=0,
            top_p_S=None if top_p is None else torch.full((num,), top_p, dtype=torch.float64),
            min_p_S=None,
        ),
    )


def draws_of(sampling: DraftSampling, kept: torch.Tensor | None) -> DraftDraws:
    num = sampling.seed_S.shape[0]
    return DraftDraws(sampling, anchor_positions_S=torch.arange(num) + 10, target_ids_U=kept, vocab_size=VOCAB)


def logits_of(num: int, width: int) -> torch.Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
def test_drafts_follow_what_is_handed_over(kept: torch.Tensor | None) -> None:
    num, width = 20000, VOCAB if kept is None else len(KEPT)
    logits_V = logits_of(1, width)
    draws = draws_of(sampling_of(num, coins=torch.ones(num, dtype=torch.bool), top_p=0.85), kept)
    for index in range(2):
        drafts = draws(logits_V.expand(num, -1), index)
        targets = drafts if kept is None else kept[drafts]
        probs = draws.probs()
        assert probs is not None and probs.shape == (num, index + 1, VOCAB)
        assert probs[0, index].sum() == pytest.approx(1)
        assert chi_square_p_value(counts_of(targets, VOCAB), probs[0, index]) > 1e-4
    expected = softmax(
        truncate(
            tempered(logits_V, torch.tensor([0.8])),
            top_k_N=None,
            largest_k=0,
            top_p_N=torch.tensor([0.85]),
            min_p_N=None,
        )
    )[0]
    columns = torch.arange(VOCAB) if kept is None else kept
    torch.testing.assert_close(probs[0, 0][columns], expected)
    assert float(probs[0, 0].sum() - probs[0, 0][columns].sum()) == 0


@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
def test_matching_requests_are_drafted_with_the_noise_of_the_target(kept: torch.Tensor | None) -> None:
    """A drafter whose logits are the target's, as far as its vocabulary reaches, draws the target's token."""
    num = 300
    columns = torch.arange(VOCAB) if kept is None else kept
    logits = logits_of(num, VOCAB)
    target = torch.full_like(logits, -torch.inf).index_copy(1, columns, logits[:, columns])
    sampling = sampling_of(num)
    drafts = draws_of(sampling, kept)(logits[:, columns], 3)
    keys = draw_keys(sampling.seed_S, sampling.sample_S, torch.arange(num) + 10 + 1 + 3, Purpose.SAMPLE)
    drawn = draw(tempered(target, sampling.temperature_S), keys, torch.arange(VOCAB))
    assert torch.equal(columns[drafts], drawn)
    assert drawn.unique().numel() == len(columns)


def test_greedy_rows_stay_greedy_and_rows_do_not_see_each_other() -> None:
    num = 12
    logits = logits_of(num, VOCAB)
    greedy, coins = torch.arange(num) % 3 == 0, torch.arange(num) % 3 == 1
    draws = draws_of(sampling_of(num, coins=coins, greedy=greedy, top_p=0.9), None)
    drafts, probs = draws(logits, 1), draws.probs()
    assert torch.equal(drafts[greedy], first_maximum(logits[greedy]))
    assert not torch.equal(drafts, first_maximum(logits))
    assert probs is not None
    for row in range(num):
        part = slice(row, row + 1)
        whole = sampling_of(num, coins=coins, greedy=greedy, top_p=0.9)
        alone = DraftDraws(
            DraftSampling(
                seed_S=whole.seed_S[part],
                sample_S=whole.sample_S[part],
                temperature_S=whole.temperature_S[part],
                greedy_S=greedy[part],
                coins_S=coins[part],
                hands_over=True,
                draws=True,
                truncation=whole.truncation.rows(torch.tensor([row])),
            ),
            anchor_positions_S=torch.tensor([row + 10]),
            target_ids_U=None,
            vocab_size=VOCAB,
        )
        assert torch.equal(alone(logits[part], 1), drafts[part])
        alone_probs = alone.probs()
        assert alone_probs is not None and torch.equal(alone_probs[0], probs[row])


def test_logits_that_are_not_finite_still_give_a_draft_in_range() -> None:
    logits = logits_of(3, VOCAB)
    logits[0, 4], logits[1] = torch.nan, -torch.inf
    draws = draws_of(sampling_of(3, coins=torch.tensor([True, True, False])), None)
    assert 0 <= int(draws(logits, 0).min()) <= int(draws(logits, 0).max()) < VOCAB
