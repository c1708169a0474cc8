"""Device state: paged latents and recurrent seats, behind one commit."""

from outrider.cache.cache_set import CacheBudget, CacheSet, CacheSnapshot
from outrider.cache.layout import CacheLayout, PagedLayout, RecurrentLayout
from outrider.cache.paged import LatentCache
from outrider.cache.recurrent import RecurrentCache, RecurrentSnapshot

__all__ = [
    "CacheBudget",
    "CacheLayout",
    "CacheSet",
    "CacheSnapshot",
    "LatentCache",
    "PagedLayout",
    "RecurrentCache",
    "RecurrentLayout",
    "RecurrentSnapshot",
]
