"""`outrider generate`: one prompt, its continuation on stdout."""

import json
import sys

from outrider.cli.arguments import Generate
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar, parse_speculation, resolve_dtype, set_threads
from outrider.engine.llm import LLM
from outrider.errors import ConfigError, EngineFault, RequestError
from outrider.request import FinishReason, RequestUpdate, RequestUsage, SamplingParams
from outrider.tokenizer import Tokenizer, answer_stop_ids

__all__ = ["run_generate"]


def run_generate(command: Generate) -> int:
    """Generate and print; returns the exit status."""
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
            max_num_seqs=1,
            progress=progress,
        )
    prompt_token_ids = command.prompt_ids or _encode(llm.tokenizer, command)
    stop_token_ids = answer_stop_ids(llm.tokenizer) if command.chat and llm.tokenizer is not None else ()
    sampling = SamplingParams(max_tokens=command.max_tokens, stop_token_ids=stop_token_ids)
    updates = llm.stream(prompt_token_ids, sampling)
    if command.json:
        return _print_json(list(updates))
    if llm.tokenizer is None:
        raise RequestError(f"{command.model} has no tokenizer files, so there is no text; add --json for token ids")
    for update in updates:
        sys.stdout.write(update.new_text)
        sys.stdout.flush()
        _raise_error(update)
    sys.stdout.write("\n")
    return 0


def _raise_error(update: RequestUpdate) -> None:
    if update.finish_reason is FinishReason.ERROR:
        raise EngineFault(update.error)


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


def _print_json(updates: list[RequestUpdate]) -> int:
    _raise_error(updates[-1])
    usage: RequestUsage | None = updates[-1].usage
    reason = updates[-1].finish_reason
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
    return 0
