"""The toy of all gates: 14 layers, four snapshots of the residual stream, MLA in layers 3, 7, 11 and 13.

A gate asserts equal bits. What it compares with is each request alone, without drafts, in a fresh engine.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.registry import load_target
from outrider.request import Request
from outrider.testing.golden import GOLDEN_SEED
from outrider.testing.scripted import Script, oracle
from outrider.testing.toy import deep_toy, write_toy_checkpoint
from outrider.testing.workbench import Trace, Workbench, ask

MAX_LEN = 64
SHAPES = ((5, 16), (18, 8), (37, 7))  # prompt and output tokens; the KDA chunk is 16


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One dtype: engines on the toy, the requests, and what each gets alone."""

    bench: Workbench
    asked: tuple[Request, ...]
    alone: Trace
    right: Script  # drafts that are always right

    @property
    def names(self) -> list[str]:
        return [request.request_id for request in self.asked]


@pytest.fixture(scope="session")
def deep_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("deep"), deep_toy(), seed=GOLDEN_SEED)


@pytest.fixture(scope="session")
def deep(deep_directory: Path) -> Callable[[torch.dtype], KimiK3Model]:
    @functools.cache
    def load(dtype: torch.dtype) -> KimiK3Model:
        model = load_target(deep_directory, dtype=dtype)
        assert isinstance(model, KimiK3Model)
        return model

    return load


def merged(traces: list[Trace]) -> Trace:
    whole = Trace()
    for trace in traces:
        for name in ("token_ids", "ends", "logits", "states", "rounds"):
            getattr(whole, name).update(getattr(trace, name))
    return whole


@pytest.fixture(scope="session")
def lab(deep: Callable[[torch.dtype], KimiK3Model]) -> Callable[[torch.dtype], Lab]:
    dice = random.Random(11)
    asked = tuple(
        ask(f"r{index}", [dice.randrange(8, 250) for _ in range(length)], max_tokens)
        for index, (length, max_tokens) in enumerate(SHAPES)
    )

    @functools.cache
    def make(dtype: torch.dtype) -> Lab:
        bench = Workbench(deep(dtype), max_model_len=MAX_LEN)
        alone = merged([bench.run([request]) for request in asked])
        right = oracle([request.prompt_token_ids + alone.token_ids[request.request_id] for request in asked])
        return Lab(bench=bench, asked=asked, alone=alone, right=right)

    return make
