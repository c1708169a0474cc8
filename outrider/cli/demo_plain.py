"""The demo of a model that has no drafter: what it answers, and how fast plain decoding is."""

import time

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from outrider.bench.workload import demo_prompt_path, draw_prompts, load_prompt_set
from outrider.cli.arguments import Demo
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar
from outrider.engine.llm import LLM
from outrider.errors import RequestError
from outrider.request import SamplingParams
from outrider.tokenizer import answer_stop_ids

__all__ = ["show_plain_answers"]

TIERS = ("low_entropy", "mixed", "high_entropy")


def show_plain_answers(console: Console, command: Demo, width: int) -> int:
    """Answer one prompt of each tier; returns the exit status.

    Raises:
        RequestError: the model has no tokenizer files.
    """
    with loading_bar(command.model) as progress:
        llm = LLM(
            resolve_checkpoint(command.model),
            max_num_seqs=1,
            numerics=command.numerics,
            probe=command.probe,
            progress=progress,
        )
    if llm.tokenizer is None:
        raise RequestError(f"{command.model} has no tokenizer files, which prompts in text form need; add them")
    console.print(
        f"no drafter ships with {command.model}: answers without speculation; --drafter D shows both", markup=False
    )
    sampling = SamplingParams(max_tokens=command.max_tokens, stop_token_ids=answer_stop_ids(llm.tokenizer))
    prompts = load_prompt_set(demo_prompt_path()).prompts
    for tier in TIERS:
        (prompt,) = draw_prompts(prompts, tier, 1)
        token_ids = llm.tokenizer.render_chat([{"role": "user", "content": prompt.text}])
        begin_s = time.perf_counter()
        (answer,) = llm.generate([token_ids], sampling)
        seconds = time.perf_counter() - begin_s
        console.print(Panel(Text(prompt.text), title=f"{tier}: prompt", title_align="left", width=width))
        title = f"{len(answer.token_ids)} tokens in {seconds:.2f} s, the prompt included"
        console.print(Panel(Text(answer.text), title=title, title_align="left", width=width))
    return 0
