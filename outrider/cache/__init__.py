"""Device state: paged latents and recurrent seats, behind one commit."""

from outrider.cache.cache_set import CacheBudget, CacheSet
from outrider.cache.layout import CacheLayout, PagedLayout, RecurrentLayout
from outrider.cache.paged import LatentCache
from outrider.cache.recurrent import RecurrentCache

__all__ = [
    "CacheBudget",
    "CacheLayout",
    "CacheSet",
    "LatentCache",
    "PagedLayout",
    "RecurrentCache",
    "RecurrentLayout",
]
