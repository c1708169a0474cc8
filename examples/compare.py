"""Check on one prompt that the drafter changes nothing but speed: python examples/compare.py MODEL DRAFTER."""

import sys
import time

from outrider.engine.llm import LLM
from outrider.request import SamplingParams

PROMPT = "The lighthouse keeper climbed the stairs before dawn and"


def main(model: str, drafter: str) -> None:
    outputs = []
    for name, llm in (("off", LLM(model)), ("on", LLM(model, drafter=drafter))):
        begin = time.perf_counter()
        (answer,) = llm.generate([PROMPT], SamplingParams(max_tokens=64))
        outputs.append(answer.token_ids)
        print(f"speculation {name}: {answer.usage.num_rounds} rounds, {time.perf_counter() - begin:.2f} s")
    print("identical" if outputs[0] == outputs[1] else "DIFFERENT")


if __name__ == "__main__":
    main(*sys.argv[1:])
