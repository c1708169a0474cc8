"""Latent rows are stored where they are told, and nowhere else."""

import torch

from outrider.cache import LatentCache


def make() -> LatentCache:
    return LatentCache(num_layers=2, num_pages=3, page_size=4, width=5, dtype=torch.float32, device=torch.device("cpu"))


def test_write_stores_rows_of_one_layer_only() -> None:
    cache = make()
    cache.poison(range(3))
    rows = torch.randn(3, 5)
    cache.write(1, torch.tensor([11, 0, 6]), rows)
    assert torch.equal(cache.rows(1)[[11, 0, 6]], rows)
    assert cache.rows(1).isnan().all(dim=1).sum() == 9
    assert cache.rows(0).isnan().all()
    assert cache.rows(1).shape == (12, 5)


def test_a_rejected_row_is_overwritten_not_added_to() -> None:
    cache = make()
    cache.write(0, torch.tensor([5]), torch.full((1, 5), torch.nan))
    cache.write(0, torch.tensor([5]), torch.ones(1, 5))
    assert torch.equal(cache.rows(0)[5], torch.ones(5))
