"""`outrider demo`: real prompts answered with speculation off and on, and what it gained."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from outrider.bench.ab import RepeatRule, Workload, run_cell
from outrider.bench.arm import AUTO, PLAIN, parse_arms
from outrider.bench.closed_loop import run_pass
from outrider.bench.records import PromptRecord
from outrider.bench.report import cell_table, round_table
from outrider.bench.summary import CellKey, CellSummary
from outrider.bench.workload import BenchPrompt, PromptSet, demo_prompt_path, draw_prompts, load_prompt_set
from outrider.cli.arguments import Demo
from outrider.cli.arms import ArmOptions, Ticker, answer_sampling, open_arms, tokenise, tokenizer_of
from outrider.cli.checkpoints import resolve_checkpoint, shipped_drafter
from outrider.cli.demo_plain import show_plain_answers
from outrider.cli.runtime import resolve_dtype, set_threads
from outrider.engine.llm import LLM
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer

__all__ = ["run_demo"]

WIDTH = 120
NUM_SHOWN_PROMPT_CHARS = 400
EXIT_DIFFERENT = 1
NUM_REPEATS = 3  # enough for an interval; a verdict takes `bench ab`


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCell:
    """One row of the demo's table."""

    tier: str
    concurrency: int
    num_prompts: int


CELLS = (
    DemoCell(tier="low_entropy", concurrency=1, num_prompts=4),
    DemoCell(tier="high_entropy", concurrency=1, num_prompts=4),
    DemoCell(tier="mixed", concurrency=4, num_prompts=8),
)
TIERS = ("low_entropy", "mixed", "high_entropy")


def run_demo(command: Demo) -> int:
    """Show it; returns 1 if any two outputs differ, else 0."""
    begin_s = time.perf_counter()
    console = Console(width=WIDTH)
    set_threads(command.threads)
    drafter = command.drafter or shipped_drafter(command.model)
    if not drafter:
        return show_plain_answers(console, command, WIDTH)
    arms = open_arms(
        parse_arms((PLAIN, AUTO)),
        ArmOptions(
            model=resolve_checkpoint(command.model),
            drafter=resolve_checkpoint(drafter),
            dtype=resolve_dtype("auto"),
            device="cpu",
            experts="auto",
            max_num_seqs=max(cell.concurrency for cell in CELLS),
            numerics=command.numerics,
            probe=command.probe,
        ),
    )
    console.print(f"target {command.model}, drafter {drafter}, loaded in {time.perf_counter() - begin_s:.1f} s")
    prompt_set = load_prompt_set(demo_prompt_path())
    same = [
        _show_answers(console, arms, draw_prompts(prompt_set.prompts, tier, 1)[0], command.max_tokens) for tier in TIERS
    ]
    ticker = Ticker()
    cells = [_measure(arms, prompt_set, cell, command.max_tokens, ticker) for cell in CELLS]
    console.print()
    console.print(cell_table(cells))
    console.print()
    console.print(round_table(cells))
    all_same = all(same) and all(cell.identical for cell in cells)
    is_promised = command.numerics == "exact"
    difference = "DIFFERENT, which must not happen" if is_promised else "different, as fast numerics allows"
    verdict = "byte-identical" if all_same else difference
    num_outputs = len(same) + sum(cell.num_prompts for cell in cells)
    console.print(
        f"\nAll {num_outputs} answers with speculation off and on: {verdict}. "
        f"Done in {time.perf_counter() - begin_s:.0f} s."
    )
    return 0 if all_same or not is_promised else EXIT_DIFFERENT


def _show_answers(console: Console, arms: Mapping[str, LLM], prompt: BenchPrompt, max_tokens: int) -> bool:
    """Both answers side by side, and whether their bytes are equal."""
    tokenizer = tokenizer_of(arms[PLAIN].tokenizer)
    records = {
        name: run_pass(
            llm.engine, [tokenise(prompt, tokenizer)], concurrency=1, sampling=answer_sampling(tokenizer, max_tokens)
        ).prompts[0]
        for name, llm in arms.items()
    }
    texts = {name: _text_of(record.token_ids, tokenizer) for name, record in records.items()}
    shown = prompt.text if len(prompt.text) <= NUM_SHOWN_PROMPT_CHARS else f"{prompt.text[:NUM_SHOWN_PROMPT_CHARS]} ..."
    console.print()
    console.print(Panel(Text(shown), title=f"{prompt.tier}: prompt", title_align="left", width=WIDTH))
    titles = {PLAIN: "speculation off", AUTO: "speculation on"}
    panels = [
        Panel(Text(texts[name]), title=f"{titles[name]}: {_pace(record)}", title_align="left", width=WIDTH // 2 - 1)
        for name, record in records.items()
    ]
    console.print(Columns(panels, padding=(0, 1)))
    same = records[PLAIN].token_ids == records[AUTO].token_ids and texts[PLAIN] == texts[AUTO]
    console.print("byte-identical: " + ("yes" if same else "NO"))
    return same


def _text_of(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)  # unlike decode, it takes every id that a model can emit
    return detokenizer.push(token_ids) + detokenizer.flush()


def _pace(record: PromptRecord) -> str:
    num_tokens = len(record.token_ids)
    return f"{num_tokens} tokens in {record.num_rounds} rounds, {record.decode_s:.2f} s"


def _measure(
    arms: Mapping[str, LLM], prompt_set: PromptSet, cell: DemoCell, max_tokens: int, ticker: Ticker
) -> CellSummary:
    tokenizer = tokenizer_of(arms[PLAIN].tokenizer)
    prompts = draw_prompts(prompt_set.prompts, cell.tier, cell.num_prompts)
    key = CellKey(tier=cell.tier, concurrency=cell.concurrency, prompt_length=None, prompt_set=prompt_set.name)
    return run_cell(
        {name: llm.engine for name, llm in arms.items()},
        Workload(
            key=key,
            prompts=[tokenise(prompt, tokenizer) for prompt in prompts],
            sampling=answer_sampling(tokenizer, max_tokens),
        ),
        rule=RepeatRule(min_repeats=NUM_REPEATS, max_repeats=NUM_REPEATS),
        progress=ticker,
    )
