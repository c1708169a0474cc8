"""What the pair does on a prompt file, for the model cards: no timing in here.

By tier: mean next-token entropy over greedy outputs, share of right answers where the file has a
``reference``, share of looping outputs, and with a drafter tokens per round over all outputs and
over the non-looping ones of at least 48 tokens.

Usage: ``python recipes/k3_small/evaluate.py models/k3-small PROMPTS.jsonl OUT.json
[--drafter models/k3-small-dspark] [--num-prompts 60] [--max-tokens 256]``
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from answering import answer_all, plain_engine

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache.cache_set import CacheSet
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.loops import ends_in_loop
from outrider.models.dspark.config_json import read_config
from outrider.models.registry import load_target
from outrider.request import RequestUsage, SamplingParams
from outrider.tokenizer import Tokenizer, answer_stop_ids, load_tokenizer

NUM_SEATS, MAX_POSITIONS = 16, 4096
LONG_ENOUGH = 48  # tokens an output needs to count for tokens per round


class EntropyMeter:
    """A target that sums the entropy of every distribution it is asked for, in nats."""

    def __init__(self, target) -> None:  # type: ignore[no-untyped-def]
        self.target = target
        self.vocab_size, self.cache_layouts = target.vocab_size, target.cache_layouts
        self.set_aux_layers, self.total, self.count = target.set_aux_layers, 0.0, 0

    def forward(self, batch: ForwardBatch, caches: CacheSet) -> TargetOutput:
        """Forward and add up."""
        output = self.target.forward(batch, caches)
        log_probabilities = output.logits_NV.float().log_softmax(-1)
        self.total -= float((log_probabilities.exp() * log_probabilities).sum())
        self.count += output.logits_NV.shape[0]
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAnswer:
    """The greedy output of one row of a prompt file."""

    row: dict
    token_ids: list[int]
    usage: RequestUsage | None


def read_rows(path: Path, num_prompts: int) -> dict[str, list[dict]]:
    """Up to ``num_prompts`` rows of each tier, evenly over its sub-categories."""
    by_kind: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text(encoding="utf8").splitlines():
        row = json.loads(line)
        by_kind[row["category"]][row["sub_category"]].append(row)
    chosen = {}
    for tier, kinds in sorted(by_kind.items()):
        turns = max(len(rows) for rows in kinds.values())
        drawn = [rows[turn] for turn in range(turns) for rows in kinds.values() if turn < len(rows)]
        chosen[tier] = drawn[:num_prompts]
    return chosen


def answer_rows(engine: Engine, rows: list[dict], tokenizer: Tokenizer, limit: int) -> list[RowAnswer]:
    """Greedy answers in the chat form, stopped at the end of the response channel."""
    rendered = [tokenizer.render_chat([{"role": "user", "content": row["turns"][0]}]) for row in rows]
    fitting = [(row, ids) for row, ids in zip(rows, rendered, strict=True) if len(ids) + limit <= MAX_POSITIONS]
    sampling = SamplingParams(max_tokens=limit, stop_token_ids=answer_stop_ids(tokenizer))
    answers = answer_all(engine, [ids for _, ids in fitting], sampling)
    return [
        RowAnswer(row=row, token_ids=answer.token_ids, usage=answer.usage)
        for (row, _), answer in zip(fitting, answers, strict=True)
    ]


def is_right(answer: RowAnswer, tokenizer: Tokenizer) -> bool:
    """Whether the reference stands in the answer (whole, or as a number for needle questions)."""
    text = tokenizer.decode(answer.token_ids).strip()
    references = [reference.strip() for reference in answer.row["reference"]]
    if answer.row["sub_category"] in ("needle", "needle_exam", "reasoning"):
        return any(reference in text for reference in references)
    return text in references


def summarise(answers: list[RowAnswer], tokenizer: Tokenizer) -> dict[str, object]:
    """Figures of one tier."""
    looping = [ends_in_loop(answer.token_ids) for answer in answers]
    graded = [is_right(answer, tokenizer) for answer in answers if answer.row.get("reference")]
    clean = [
        answer
        for answer, loops in zip(answers, looping, strict=True)
        if not loops and len(answer.token_ids) >= LONG_ENOUGH
    ]

    def tokens_per_round(some: list[RowAnswer]) -> float | None:
        rounds = sum(answer.usage.num_rounds for answer in some if answer.usage)
        # The first token comes with the prompt; an answer may also stop before it.
        tokens = sum(max(len(answer.token_ids) - 1, 0) for answer in some)
        return round(tokens / rounds, 3) if rounds else None

    return {
        "prompts": len(answers),
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "looping_share": round(sum(looping) / max(1, len(answers)), 3),
        "long_non_looping": len(clean),
        "right_share": round(sum(graded) / len(graded), 3) if graded else None,
        "graded": len(graded),
        "tokens_per_round": tokens_per_round(answers),
        "tokens_per_round_clean": tokens_per_round(clean),
        "tokens_per_round_by_task": {
            kind: tokens_per_round([answer for answer in answers if answer.row["sub_category"] == kind])
            for kind in sorted({answer.row["sub_category"] for answer in answers})
        },
    }


def metered_engine(meter: EntropyMeter) -> Engine:
    """An engine without a drafter around a metered target."""
    return plain_engine(
        meter,
        chunk_multiple=meter.target.chunk_multiple,
        num_seats=NUM_SEATS,
        max_model_len=MAX_POSITIONS,
    )


def pair_engine(arguments: argparse.Namespace) -> Engine:
    """The drafter's own drafts, all verified in every round: it is judged, not lookup or the choice of lengths."""
    return LLM(
        arguments.model,
        arguments.drafter,
        speculation=read_config(arguments.drafter).num_draft_tokens,
        lookup=False,
        max_num_seqs=NUM_SEATS,
        max_model_len=MAX_POSITIONS,
    ).engine


def evaluate(arguments: argparse.Namespace) -> dict[str, object]:
    """Run every tier."""
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.model)
    target = load_target(arguments.model, dtype=torch.bfloat16)
    result: dict[str, object] = {"prompts": arguments.prompts.name, "max_tokens": arguments.max_tokens}
    for tier, rows in read_rows(arguments.prompts, arguments.num_prompts).items():
        meter = EntropyMeter(target)
        engine = pair_engine(arguments) if arguments.drafter else metered_engine(meter)
        answers = answer_rows(engine, rows, tokenizer, arguments.max_tokens)
        figures = summarise(answers, tokenizer)
        if not arguments.drafter:
            figures["entropy_nats"] = round(meter.total / max(1, meter.count), 3)
        result[tier] = figures
        for answer in answers[: arguments.show]:
            print("-----", tier, answer.row["sub_category"], "\n", tokenizer.decode(answer.token_ids))
    return result


def main() -> None:
    """Parse the arguments, evaluate, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", type=int, default=0)
    arguments = parser.parse_args()
    result = evaluate(arguments)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
