"""The chunked losses equal the plain ones, gradients included."""

import pytest
import torch
import torch.nn.functional as F

from outrider.training import losses
from outrider.training.losses import DraftHeadLoss, HeadCrossEntropy, confidence_loss, drafter_losses, teacher_head


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(losses, "HEAD_CHUNK", 7)
    torch.manual_seed(0)


def test_head_cross_entropy_equals_the_plain_form():
    hidden = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    targets, weights = torch.randint(0, 31, (23,)), torch.rand(23, dtype=torch.float64)
    plain = (F.cross_entropy(hidden @ head.T, targets, reduction="none") * weights).sum() * 3
    expected = torch.autograd.grad(plain, (hidden, head))
    chunked = HeadCrossEntropy.apply(hidden, head, targets, weights) * 3
    torch.testing.assert_close(chunked, plain)
    for found, wanted in zip(torch.autograd.grad(chunked, (hidden, head)), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_draft_head_loss_equals_the_plain_form():
    draft_ids = torch.tensor([1, 4, 5, 9, 11, 20, 28])
    double = {"dtype": torch.float64}
    leaves = [torch.randn(shape, **double).requires_grad_() for shape in ((23, 8), (23, 3), (7, 8), (7, 3))]
    hidden, previous, head, markov = leaves
    taught, target_head = torch.randn(23, 8, **double), torch.randn(31, 8, **double)
    labels = torch.randint(-1, 7, (23,))
    weights = torch.rand(23, **double)
    weights = weights / weights.sum()
    confidence = torch.randn(23, **double)
    logits = hidden @ head.T + previous @ markov.T
    teacher = (taught @ target_head.T).softmax(-1)[:, draft_ids]
    plain = drafter_losses(logits, confidence, teacher, labels, weights)
    value = losses.CROSS_ENTROPY_WEIGHT * plain.cross_entropy + losses.TOTAL_VARIATION_WEIGHT * plain.distance
    expected = torch.autograd.grad(value, leaves)
    chunked, distance, agree = DraftHeadLoss.apply(
        *leaves, taught, teacher_head(target_head, draft_ids), labels, weights
    )
    torch.testing.assert_close(chunked, value)
    torch.testing.assert_close((distance * weights).sum(), plain.distance)
    torch.testing.assert_close(confidence_loss(confidence, distance, weights), plain.confidence)
    assert torch.equal(agree, draft_ids[logits.argmax(-1)] == (taught @ target_head.T).argmax(-1))
    for found, wanted in zip(torch.autograd.grad(chunked, leaves), expected, strict=True):
        torch.testing.assert_close(found, wanted)
