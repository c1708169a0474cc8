"""The commands that look at rounds after the fact, as frozen records; see arguments.py."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from outrider.cli.flags import Dtype, Experts, Model, Names, Reals

__all__ = ["Calibrate", "ImportGguf", "Replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Fit what the drafter's confidence is worth, and write it beside its weights."""

    model: Model
    """Target checkpoint directory, or its name under models/."""
    drafter: str
    """Drafter checkpoint directory, or its name under models/; it needs a confidence head."""
    prompts: str = ""
    """JSONL file with question_id, category, sub_category and turns to fit on; none = the shipped prompts."""
    held_out: str = ""
    """Another such file, on which errors are taken; none = on the prompts of the fit, which flatters it."""
    num_prompts: int = 48
    """Prompts per category of each file, taking turns over sub_category."""
    temperatures: Reals = (0.0, 0.7, 1.0)
    """Temperatures of the answers; 0 is greedy, where all rules are the same one."""
    rules: Names = ("match", "rejection", "block")
    """Rules of acceptance, at each temperature above 0."""
    seed: int = 0
    """Of the first prompt; each further prompt draws with the next one."""
    max_tokens: int = 128
    """Tokens per answer at most."""
    concurrency: int = 16
    """Answers in flight; with exact numerics they do not depend on it."""
    out: str = ""
    """File for the fit; none = calibration.json in the drafter's directory."""
    json: str = ""
    """File for the errors by condition and position."""
    plot: str = ""
    """SVG file for reliability diagrams."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    dtype: Dtype = "auto"
    """Number format of the models; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Say what another policy would have done with the rounds of a recorded run."""

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """File of --record-rounds, of a run that verified whole blocks (--speculation with the number of its drafts)."""
    policy: str
    """plain, fixedK (fixed3 verifies three drafts in every round) or auto."""
    costs: Names = ()
    """Further files of --record-rounds, whose rounds say what other shapes of a round cost."""
    concurrency: int = 0
    """Requests in flight; 0 = as many as were recorded at once."""
    seed: int = 0
    """Of the draws that stand in for drafts that were never made."""
    repeats: int = 5
    """Replays with other draws, whose spread is reported."""
    json: str = ""
    """File for the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportGguf:
    """Turn a GGUF file of a Llama or Qwen3 model into a checkpoint directory: config, weights, tokenizer, template."""

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """The .gguf file; F32, F16, BF16, Q8_0, Q4_0 and Q4_1 are read."""
    out: str = ""
    """Directory to make; none = the file's name without its ending."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of the weights written."""
