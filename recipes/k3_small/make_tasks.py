"""Write chat-form training tasks for the small K3 language model; the same seed gives the same bytes.

Reads the training corpus (one JSON object a line: kind, source, text) and writes one task a line:
kind, tier (low, mixed, high), turns (user and assistant) and, where one answer is right, reference.
The mix is set by bytes: at every step the kind that is furthest behind its share is made next.

    python recipes/k3_small/make_tasks.py CORPUS.jsonl OUT.jsonl --megabytes 40 --seed 1
    python recipes/k3_small/make_tasks.py VALID.jsonl OUT.jsonl --valid 350 --seed 2
"""

import argparse
import warnings
from collections.abc import Sequence

from tasks.mix import write_tasks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write chat-form training tasks made from a corpus.")
    parser.add_argument("corpus", help="JSON lines with kind, source and text")
    parser.add_argument("out", help="JSON lines with kind, tier, turns and reference")
    parser.add_argument("--megabytes", type=float, default=40.0, help="text to write, in millions of bytes")
    parser.add_argument("--valid", type=int, default=0, metavar="ROWS", help="this many rows, even over the kinds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # the corpus holds old Python
    write_tasks(options.corpus, options.out, options.megabytes, options.valid, options.seed)


if __name__ == "__main__":
    main()
