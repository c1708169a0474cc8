"""`outrider generate`: one prompt, its continuation on stdout."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.cli.arguments import Generate
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar, parse_speculation, resolve_dtype, set_threads
from outrider.engine.llm import LLM
from outrider.errors import ConfigError, RequestError
from outrider.request import FinishReason, RequestUpdate, SamplingParams
from outrider.tokenizer import Tokenizer, answer_stop_ids

__all__ = ["run_generate"]

EXIT_FAILED = 1


def run_generate(command: Generate) -> int:
    """Generate and print; returns 1 if the request ended with an error, else 0."""
    _check(command)
    set_threads(command.threads)
    speculation = parse_speculation(command.speculation)
    uses_drafter = bool(command.drafter) and speculation not in ("off", 0)
    with loading_bar(command.model) as progress:
        llm = LLM(
            resolve_checkpoint(command.model),
            drafter=resolve_checkpoint(command.drafter) if uses_drafter else None,
            speculation=speculation if uses_drafter else "off",
            dtype=resolve_dtype(command.dtype),
            device=command.device,
            experts=command.experts,
            numerics=command.numerics,
            probe=command.probe,
            max_num_seqs=1,
            progress=progress,
        )
    prompt_token_ids = command.prompt_ids or _encode(llm.tokenizer, command)
    stop_token_ids = answer_stop_ids(llm.tokenizer) if command.chat and llm.tokenizer is not None else ()
    sampling = SamplingParams(max_tokens=command.max_tokens, stop_token_ids=stop_token_ids)
    updates = llm.stream(prompt_token_ids, sampling)
    if not command.json and llm.tokenizer is None:
        raise RequestError(f"{command.model} has no tokenizer files, so there is no text; add --json for token ids")
    with _one_line_per_fault():
        last = _print_json(updates) if command.json else _print_text(updates)
    if last.finish_reason is FinishReason.ERROR:
        print("outrider: the request failed:", " ".join(str(last.error).split()), file=sys.stderr)
        return EXIT_FAILED
    return 0


@contextmanager
def _one_line_per_fault() -> Iterator[None]:
    """Hold back the engine's log of a failed round, which has a traceback: the request carries the cause."""
    log = logging.getLogger("outrider.engine.engine")
    log.addFilter(_has_no_traceback)
    try:
        yield
    finally:
        log.removeFilter(_has_no_traceback)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def _print_text(updates: Iterator[RequestUpdate]) -> RequestUpdate:
    """Print text as it comes, and nothing else; the line end is for a person at a terminal."""
    for update in updates:
        sys.stdout.write(update.new_text)
        sys.stdout.flush()
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    return update


def _check(command: Generate) -> None:
    if bool(command.prompt) == bool(command.prompt_ids):
        raise RequestError("give exactly one of --prompt and --prompt-ids, and not an empty one")
    if command.chat and command.prompt_ids:
        raise RequestError("--chat renders a text; use it with --prompt, or render the ids yourself")
    if not command.drafter and command.speculation not in ("auto", "off", "0"):
        raise ConfigError(f"--speculation {command.speculation} needs a drafter; add --drafter or leave it at auto")


def _encode(tokenizer: Tokenizer | None, command: Generate) -> tuple[int, ...]:
    if tokenizer is None:
        raise RequestError(f"{command.model} has no tokenizer files; use --prompt-ids")
    if command.chat:
        return tuple(tokenizer.render_chat([{"role": "user", "content": command.prompt}]))
    return tuple(tokenizer.encode(command.prompt))


def _print_json(stream: Iterator[RequestUpdate]) -> RequestUpdate:
    """Print the whole result, or nothing if the request failed."""
    updates = list(stream)
    last = updates[-1]
    if last.finish_reason is FinishReason.ERROR:
        return last
    usage, reason = last.usage, last.finish_reason
    assert usage is not None, "the last update of a request carries its usage"
    assert reason is not None, "the last update of a request carries its finish reason"
    result = {
        "text": "".join(update.new_text for update in updates),
        "token_ids": [token_id for update in updates for token_id in update.new_token_ids],
        "finish_reason": reason.value,
        "num_prompt_tokens": usage.num_prompt_tokens,
        "rounds": usage.num_rounds,
        "drafted": usage.num_drafted,
        "accepted": usage.num_accepted,
    }
    print(json.dumps(result, ensure_ascii=False))
    return last
