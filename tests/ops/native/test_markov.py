"""The native chain of greedy drafts against the torch form, draft by draft."""

from dataclasses import replace

import pytest
import torch

from outrider.models.dspark.heads import ConfidenceHead, MarkovHead, draft_chain
from outrider.ops.linear import linear
from outrider.ops.native.markov import BiasMemo, NativeMarkov, chain_weights

BF16 = torch.bfloat16
NAN, INF = float("nan"), float("inf")
SHAPES = [(300, 300, 16), (200, 131, 6), (64, 7, 2), (2000, 1500, 64)]  # target and draft vocabulary, rank


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(13)


@pytest.fixture
def markov(native):
    return NativeMarkov(native)


class Case:
    """Heads and block rows of some sequences."""

    def __init__(self, shape=SHAPES[0], sequences=5, drafts=6, width=40, with_markov=True, bias=True):
        self.vocab, self.draft_vocab, rank = shape
        sizes = {"vocab_size": self.vocab, "draft_vocab_size": self.draft_vocab, "rank": rank}
        self.head = MarkovHead(**sizes, hidden_size=width).to(BF16).requires_grad_(False)
        self.head.markov_w2.weight.normal_()
        self.confidence = ConfidenceHead(width + rank * with_markov, bias=bias).to(BF16).requires_grad_(False)
        self.with_markov = with_markov
        ids = torch.randperm(self.vocab)[: self.draft_vocab].sort().values
        self.target_ids = None if self.draft_vocab == self.vocab else ids
        self.anchors = torch.randint(0, self.vocab, (sequences,))
        self.hidden = torch.randn(sequences, drafts, width).to(BF16)
        self.logits = (torch.randn(sequences, drafts, self.draft_vocab) * 3).to(BF16)

    def weights(self, confidence=True):
        bias = self.confidence.proj.bias
        return chain_weights(
            self.head.markov_w1.weight,
            self.head.markov_w2.weight,
            target_ids_U=self.target_ids,
            confidence_F=self.confidence.proj.weight[0] if confidence else None,
            confidence_bias=0.0 if bias is None else float(bias),
            hidden_size=self.hidden.shape[2],
        )

    def native(self, markov, chosen=slice(None), confidence=True, weights=None, keep_logits=True):
        weights = weights or self.weights(confidence)
        hidden, logits = self.hidden[chosen].contiguous(), self.logits[chosen].clone()
        tokens, probability = markov.chain(weights, self.anchors[chosen], hidden, logits, keep_logits=keep_logits)
        return tokens, probability, logits

    def torch(self):
        chain = draft_chain(
            self.head,
            anchor_ids_S=self.anchors,
            hidden_GSD=self.hidden.transpose(0, 1),
            logits_GSV=self.logits.transpose(0, 1),
            target_ids_V=self.target_ids,
            linear=linear,
        )
        features = self.hidden
        if self.with_markov:
            features = torch.cat((features, torch.stack(chain.previous_GSr, dim=1)), dim=-1)
        return chain.token_ids_SG, self.confidence.probability(features, linear), torch.stack(chain.logits, dim=1)


def check(native, torch_form):
    """Logits within a unit in the last place of their terms; drafts equal up to such a near tie."""
    (tokens, confidence, logits), (expected_tokens, expected_confidence, expected_logits) = native, torch_form
    agree = tokens == expected_tokens
    alike = agree.cumprod(1).bool()  # later rows of a chain that forked have other logits
    for g in range(tokens.shape[1]):
        same_past = torch.ones_like(alike[:, 0]) if g == 0 else alike[:, g - 1]
        difference = (logits[:, g].double() - expected_logits[:, g].double()).abs().amax(1)
        assert bool((difference[same_past] <= 2.0**-6 * expected_logits[:, g].double().abs().amax(1)[same_past]).all())
        confident = (confidence[:, g] - expected_confidence[:, g]).abs()
        assert bool((confident[same_past] < 1e-5).all())
    assert float(alike.float().mean()) > 0.9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sequences", [1, 5, 8])
def test_equals_the_torch_form(markov, shape, sequences, threads):
    case = Case(shape, sequences)
    check(case.native(markov), case.torch())


@pytest.mark.parametrize(("with_markov", "bias"), [(False, True), (True, False), (False, False)])
def test_confidence_without_its_options(markov, with_markov, bias):
    case = Case(with_markov=with_markov, bias=bias)
    check(case.native(markov), case.torch())
    assert case.native(markov, confidence=False)[1] is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_logits_are_those_the_drafts_were_chosen_from(markov, shape):
    case = Case(shape)
    tokens, _, logits = case.native(markov)
    chosen = logits.max(-1).indices
    assert torch.equal(chosen if case.target_ids is None else case.target_ids[chosen], tokens)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_has_the_same_bits_alone_and_among_others(markov, shape, threads):
    case = Case(shape, sequences=9)
    whole = case.native(markov)
    case.logits[4] = NAN
    poisoned = case.native(markov)
    for s in range(9):
        alone = case.native(markov, slice(s, s + 1))
        for one, others in ((alone, poisoned), *(((alone, whole),) if s != 4 else ())):
            assert torch.equal(one[0][0], others[0][s]) and torch.equal(one[1][0], others[1][s])
            assert torch.equal(one[2][0].view(torch.int16), others[2][s].view(torch.int16))


def test_ties_go_to_the_lowest_id_and_a_nan_to_the_first(markov, threads):
    case = Case(SHAPES[3], sequences=6, drafts=1)
    case.head.markov_w2.weight.zero_()
    logits = case.logits[:, 0]
    logits.fill_(-1.0)
    logits[0, [900, 17, 1499]] = 2.0
    logits[1] = -INF
    logits[2, [1300, 40]] = NAN
    logits[2, 3] = INF
    logits[3, 5], logits[3, 4] = 0.0, -0.0
    logits[4, [1280, 1400]] = 7.0
    tokens, _, _ = case.native(markov)
    assert tokens[:, 0].tolist() == case.target_ids[[17, 0, 40, 4, 1280, 0]].tolist()


def test_threads_change_no_bit(markov):
    case = Case(SHAPES[3])
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(case.native(markov))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("num_rows", [4, 8, 256])
def test_rows_of_bias_kept_from_earlier_calls_change_no_bit(markov, num_rows, threads):
    """A memo of any size, full of other calls' tokens: hits, evictions, two sequences that want one row."""
    case = Case(SHAPES[3], sequences=8, drafts=5)
    case.anchors[:6] = torch.tensor([7, 7, *(7 + num_rows * step for step in range(1, 5))]) % case.vocab
    fresh = case.native(markov)
    weights = case.weights()
    memo = BiasMemo.empty(num_rows, case.draft_vocab)
    memo.rows_MU.fill_(NAN)
    kept = replace(weights, memo=memo)
    for chosen in ([0], [5, 3, 0, 1], list(range(8)), [7, 6, 2], list(range(8))):
        again = case.native(markov, chosen, weights=kept)
        assert all(torch.equal(one, other[chosen]) for one, other in zip(again, fresh, strict=True)), chosen
    rows = (memo.ids_M >= 0).nonzero()[:, 0]
    assert rows.numel() > 0 and torch.equal(memo.ids_M[rows] % (num_rows // 4), rows // 4)
    assert not bool(memo.rows_MU[rows].isnan().any())


def test_logits_nobody_wants_are_left_alone(markov):
    case = Case()
    kept, (tokens, confidence, logits) = case.native(markov), case.native(markov, keep_logits=False)
    assert torch.equal(tokens, kept[0]) and torch.equal(confidence, kept[1])
    assert torch.equal(logits, case.logits) and not torch.equal(kept[2], case.logits)
