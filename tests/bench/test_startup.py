"""One real start in a process of its own, and the bytes that it must hold."""

from pathlib import Path

import torch

from outrider.bench.startup import needed_bytes, start_once, startup_to_json
from outrider.engine.llm import LLM
from outrider.speculative.drafter import DSparkDrafter
from outrider.speculative.lookup_drafter import LookupDrafter


def test_a_start_and_what_it_must_hold(toy_pair: tuple[Path, Path]) -> None:
    target, drafter = toy_pair
    options = {
        "model": str(target), "drafter": str(drafter), "threads": 1, "dtype": "float32", "device": "cpu",
        "experts": "unpacked", "numerics": "exact", "probe": "skip",
    }  # fmt: skip
    start = start_once(options, vocab_size=97)
    assert min(start.interpreter_s, start.import_s, start.load_s, start.first_token_s) > 0
    assert start.total_s > start.to_first_token_s > start.load_s
    assert start.running["total"] >= start.imported["total"] > 0
    needed = needed_bytes(target, drafter, start, dtype=torch.float32, unpacked=True)
    llm = LLM(target, drafter, dtype="float32", experts="unpacked", probe="skip")
    runner = llm.engine._runner
    assert needed.caches == runner.caches.num_bytes
    parts = runner._parts
    assert isinstance(parts.drafter, LookupDrafter)
    dspark = parts.drafter.inner
    assert isinstance(dspark, DSparkDrafter)
    assert needed.drafter_context == dspark._context.rows_2LRJK.nbytes
    held = sum(parameter.nbytes for parameter in llm._target.parameters())
    assert abs(needed.target - held) < 0.02 * held  # fused score vectors are two tensors in the files
    assert needed.drafter == sum(parameter.nbytes for parameter in dspark._predictor._model.parameters())
    report = startup_to_json([start], needed)
    assert report["starts"][0]["total_s"] == start.total_s
    assert report["needed_bytes"]["total"] == needed.total
