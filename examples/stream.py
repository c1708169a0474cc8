"""Print an answer while it is generated: python examples/stream.py MODEL DRAFTER "a question"."""

import sys

from outrider.engine.llm import LLM
from outrider.request import SamplingParams


def main(model: str, drafter: str, question: str) -> None:
    llm = LLM(model, drafter=drafter)
    prompt = llm.tokenizer.render_chat([{"role": "user", "content": question}])
    for update in llm.stream(prompt, SamplingParams(max_tokens=128)):
        print(update.new_text, end="", flush=True)
    print(f"\n[{update.usage.num_output_tokens} tokens in {update.usage.num_rounds} rounds]")


if __name__ == "__main__":
    main(*sys.argv[1:])
