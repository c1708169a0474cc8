"""Queues, seats and pages: which rows each sequence contributes next, and when it ends."""

from outrider.scheduling.page_pool import IdPool
from outrider.scheduling.scheduler import Scheduler
from outrider.scheduling.sequence import Sequence, SequenceStatus, StopText

__all__ = ["IdPool", "Scheduler", "Sequence", "SequenceStatus", "StopText"]
