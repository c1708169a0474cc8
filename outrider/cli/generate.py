"""`outrider generate`: one prompt, its continuation or several samples of it on stdout."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.cli.arguments import Generate
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar, parse_speculation, resolve_dtype, set_threads
from outrider.engine.llm import LLM
from outrider.engine.round_log import RoundLog
from outrider.engine.watch import RoundWatch
from outrider.errors import ConfigError, RequestError
from outrider.request import FinishReason, RequestUpdate, SamplingParams
from outrider.tokenizer import Tokenizer, answer_stop_ids

__all__ = ["run_generate"]

EXIT_FAILED = 1
MAX_SEATS = 8  # samples that run at once; each holds a recurrent state and room for a whole context


def run_generate(command: Generate) -> int:
    """Generate and print; returns 1 if the request ended with an error, else 0."""
    _check(command)
    set_threads(command.threads)
    speculation = parse_speculation(command.speculation)
    uses_drafter = bool(command.drafter) and speculation not in ("off", 0)
    watch = _round_watch(command) if command.record_rounds else None
    with loading_bar(command.model) as progress:
        llm = LLM(
            resolve_checkpoint(command.model),
            drafter=resolve_checkpoint(command.drafter) if uses_drafter else None,
            speculation=speculation if uses_drafter else "off",
            dtype=resolve_dtype(command.dtype),
            device=command.device,
            experts=command.experts,
            max_num_seqs=min(max(command.n, 1), MAX_SEATS),
            numerics=command.numerics,
            probe=command.probe,
            progress=progress,
            watch=watch,
        )
    prompt_token_ids = command.prompt_ids or _encode(llm.tokenizer, command)
    stop_token_ids = answer_stop_ids(llm.tokenizer) if command.chat and llm.tokenizer is not None else ()
    sampling = _sampling(command, stop_token_ids)
    updates = llm.stream(prompt_token_ids, sampling)
    if not command.json and llm.tokenizer is None:
        raise RequestError(f"{command.model} has no tokenizer files, so there is no text; add --json for token ids")
    with _one_line_per_fault():
        error = _print_json(updates) if command.json else _print_text(updates, command.n)
    if error is not None:
        print("outrider: the request failed:", " ".join(error.split()), file=sys.stderr)
        return EXIT_FAILED
    return 0


def _round_watch(command: Generate) -> RoundWatch:
    settings = {
        "model": Path(command.model).name,
        "drafter": Path(command.drafter).name,
        "speculation": command.speculation if command.drafter else "off",
    }
    return RoundWatch(RoundLog(Path(command.record_rounds), settings))


def _sampling(command: Generate, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    biased = [token_id for token_id, _ in command.logit_bias]
    twice = sorted({token_id for token_id in biased if biased.count(token_id) > 1})
    if twice:
        raise RequestError(f"--logit-bias names token {twice[0]} more than once; give it one number")
    if command.logprobs is not None and not command.json:
        raise RequestError("--logprobs has no place in a text; use it with --json")
    return SamplingParams(
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        min_p=command.min_p,
        repetition_penalty=command.repetition_penalty,
        presence_penalty=command.presence_penalty,
        frequency_penalty=command.frequency_penalty,
        logit_bias=dict(command.logit_bias),
        n=command.n,
        seed=command.seed,
        max_tokens=command.max_tokens,
        min_tokens=command.min_tokens,
        stop=command.stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=command.ignore_eos,
        logprobs=command.logprobs,
        acceptance=command.acceptance,
    )


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


def _print_text(stream: Iterator[RequestUpdate], num_samples: int) -> str | None:
    """Print text as it comes, and nothing else; returns the error of a sample that failed.

    The line end of a single text is for a person at a terminal. Several texts are printed whole, by index.
    """
    if num_samples > 1:
        samples = _by_sample(stream)
        for updates in samples:
            sys.stdout.write("".join(update.new_text for update in updates) + "\n")
        return _error_of(samples)
    updates = []
    for update in stream:
        updates.append(update)
        sys.stdout.write(update.new_text)
        sys.stdout.flush()
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    return _error_of([updates])


def _by_sample(stream: Iterator[RequestUpdate]) -> list[list[RequestUpdate]]:
    """All updates of every sample, by sample index."""
    samples: dict[int, list[RequestUpdate]] = {}
    for update in stream:
        samples.setdefault(update.sample_index, []).append(update)
    return [samples[index] for index in sorted(samples)]


def _error_of(samples: list[list[RequestUpdate]]) -> str | None:
    return next((str(u[-1].error) for u in samples if u[-1].finish_reason is FinishReason.ERROR), None)


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


def _print_json(stream: Iterator[RequestUpdate]) -> str | None:
    """Print the whole result, or nothing if a sample failed; returns its error."""
    samples = _by_sample(stream)
    error = _error_of(samples)
    if error is None:
        outputs = [_sample_fields(updates) for updates in samples]
        first = {name: value for name, value in outputs[0].items() if name != "sample_index"}
        seed = samples[0][-1].seed
        print(json.dumps({**first, "seed": seed, "outputs": outputs}, ensure_ascii=False))
    return error


def _sample_fields(updates: list[RequestUpdate]) -> dict[str, Any]:
    last = updates[-1]
    usage, reason = last.usage, last.finish_reason
    assert usage is not None, "the last update of a request carries its usage"
    assert reason is not None, "the last update of a request carries its finish reason"
    return {
        "sample_index": last.sample_index,
        "text": "".join(update.new_text for update in updates),
        "token_ids": [token_id for update in updates for token_id in update.new_token_ids],
        "logprobs": _logprob_fields(updates),
        "finish_reason": reason.value,
        "num_prompt_tokens": usage.num_prompt_tokens,
        "rounds": usage.num_rounds,
        "drafted": usage.num_drafted,
        "accepted": usage.num_accepted,
    }


def _logprob_fields(updates: list[RequestUpdate]) -> list[dict[str, Any]] | None:
    """One record per token; None unless asked for."""
    if all(update.logprobs is None for update in updates):
        return None
    return [
        {
            "token_id": token.token_id,
            "logprob": token.logprob,
            "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in token.top],
        }
        for update in updates
        for token in update.logprobs or ()
    ]
