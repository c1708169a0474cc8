"""Continue a few prompts in one batch: python examples/generate.py MODEL [DRAFTER]."""

import sys

from outrider.engine.llm import LLM
from outrider.request import SamplingParams

PROMPTS = ("The lighthouse keeper", "def add(a, b):\n", "It was a dark night, and")


def main(model: str, drafter: str | None = None) -> None:
    llm = LLM(model, drafter=drafter)
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(max_tokens=32)), strict=True):
        print(f"{prompt!r} -> {answer.text!r} ({answer.finish_reason}, {answer.usage.num_rounds} rounds)")


if __name__ == "__main__":
    main(*sys.argv[1:])
