"""Print an answer while it is generated: python examples/stream.py MODEL DRAFTER "a question"."""

import sys

from outrider.engine.llm import LLM
from outrider.request import SamplingParams
from outrider.tokenizer import answer_stop_ids


def main(model: str, drafter: str, question: str) -> None:
    llm = LLM(model, drafter=drafter)
    prompt = llm.tokenizer.render_chat([{"role": "user", "content": question}])
    # What follows the answer in the chat form only closes the message.
    sampling = SamplingParams(max_tokens=128, stop_token_ids=answer_stop_ids(llm.tokenizer))
    for update in llm.stream(prompt, sampling):
        print(update.new_text, end="", flush=True)
    print(f"\n[{update.usage.num_output_tokens} tokens in {update.usage.num_rounds} rounds]")


if __name__ == "__main__":
    main(*sys.argv[1:])
