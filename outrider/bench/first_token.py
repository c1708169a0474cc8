"""One start of an engine, up to its first token, in a process of its own: what `outrider bench startup` repeats.

Reads a JSON object from the command line and prints one; times are readings of the monotonic clock, which
parent and child share.
"""

import json
import sys
import time

begin_s = time.perf_counter()

import torch  # noqa: E402 - the import is a part of what is measured

from outrider.engine.llm import LLM  # noqa: E402
from outrider.engine.resident import resident_bytes  # noqa: E402
from outrider.request import SamplingParams  # noqa: E402

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Start, generate one token, report."""
    options = json.loads(arguments[0])
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    imported_s, imported = time.perf_counter(), resident_bytes()
    llm = LLM(
        options["model"],
        drafter=options["drafter"] or None,
        dtype=options["dtype"],
        device=options["device"],
        experts=options["experts"],
        numerics=options["numerics"],
        probe=options["probe"],
    )
    loaded_s, loaded = time.perf_counter(), resident_bytes()
    (answer,) = llm.generate([options["prompt"]], SamplingParams(max_tokens=1, ignore_eos=True))
    report = {
        "begin_s": begin_s,
        "imported_s": imported_s,
        "loaded_s": loaded_s,
        "first_token_s": time.perf_counter(),
        "num_tokens": len(answer.token_ids),
        "imported": imported,
        "loaded": loaded,
        "running": resident_bytes(),
        "derived_bytes": llm.memory.derived_bytes,
        "num_slots": llm.config.scheduler.max_num_seqs,
        "num_cache_tokens": llm.config.cache.num_pages * llm.config.cache.page_size,
        "num_log_rows": min(
            llm.config.scheduler.max_step_rows,
            llm.config.scheduler.max_num_seqs * (1 + llm.config.num_draft_tokens),
        ),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
