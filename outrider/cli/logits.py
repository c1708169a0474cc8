"""`outrider logits`: the logits of the last prompt position, for comparison with other implementations."""

import json

from outrider.cli.arguments import Logits
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar, prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine.llm import LLM
from outrider.errors import RequestError

__all__ = ["run_logits"]


def run_logits(command: Logits) -> int:
    """Compute and write; returns the exit status."""
    if not command.prompt_ids:
        raise RequestError("--prompt-ids is empty; give at least one token id")
    output = prepare_output(command.json)
    set_threads(command.threads)
    with loading_bar(command.model) as progress:
        llm = LLM(
            resolve_checkpoint(command.model),
            dtype=resolve_dtype(command.dtype),
            device=command.device,
            experts=command.experts,
            numerics=command.numerics,
            probe=command.probe,
            max_num_seqs=1,
            progress=progress,
        )
    logits_V = llm.last_logits(command.prompt_ids)
    result = {
        "model": command.model,
        "dtype": str(logits_V.dtype).removeprefix("torch."),
        "prompt_token_ids": list(command.prompt_ids),
        "logits": logits_V.double().tolist(),  # a float64 holds every value of the narrower types exactly
    }
    write_output(output, json.dumps(result))
    return 0
