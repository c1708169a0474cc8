"""The commands as frozen records: tyro makes flags and help from them, so there is nothing else to parse.

A new flag is a new field here and a new line in the frozen list of tests/test_architecture.py.
"""

from dataclasses import dataclass
from typing import Annotated

import tyro

from outrider.cli.arguments_offline import Calibrate, ImportGguf, Replay
from outrider.cli.arguments_pair import Chat, Doctor, Verify
from outrider.cli.flags import Acceptance, Biases, Dtype, Experts, Ints, Model, Names, Numerics, Probe, Reals

__all__ = [
    "Bench",
    "BenchAb",
    "BenchAcceptance",
    "BenchNumerics",
    "BenchStartup",
    "BenchStep",
    "Calibrate",
    "Chat",
    "Command",
    "Demo",
    "Doctor",
    "Generate",
    "ImportGguf",
    "Inspect",
    "Logits",
    "Replay",
    "Verify",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Continue one prompt and print the generated text, nothing else, on stdout. Greedy by default."""

    model: Model
    """Checkpoint directory, or its name under models/."""
    drafter: str = ""
    """DSpark checkpoint directory, or its name under models/; none = plain decoding."""
    speculation: str = "auto"
    """auto = as much as pays, off = none, or a number of drafts in every round."""
    prompt: str = ""
    """The prompt as text."""
    prompt_ids: Ints = ()
    """The prompt as token ids, instead of --prompt."""
    chat: bool = False
    """Render --prompt as a user message in the chat form of the checkpoint."""
    max_tokens: int = 128
    """Tokens to generate at most."""
    min_tokens: int = 0
    """Tokens before which no stop id is drawn and no stop string ends the text."""
    temperature: float = 0.0
    """0 = greedy; above, the larger the more random."""
    top_k: int = 0
    """Draw from the K most likely tokens; 0 = from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together reach this probability; 1 = from all."""
    min_p: float = 0.0
    """Draw from tokens at least this many times as likely as the best one; 0 = from all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output; 0 = off."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output once per occurrence; 0 = off."""
    logit_bias: Biases = ()
    """Added to the logits of tokens, such as 17:-100,5:2.5."""
    seed: int | None = None
    """What the draws depend on; none = a fresh one, which --json reports."""
    n: int = 1
    """Samples of the prompt; their texts are printed one after the other, each with a line end."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the output, which is cut just before it; may be given several times."""
    ignore_eos: bool = False
    """Treat the end-of-sequence ids of the checkpoint as ordinary tokens."""
    logprobs: int | None = None
    """With --json: log probability of every token, and this many most likely ones beside it."""
    acceptance: Acceptance = "match"
    """How drafts stand: equal to the target's own draw (match), or by coins (rejection, block)."""
    json: bool = False
    """Print one JSON object instead: text, token ids, seed, log probabilities, rounds and more, of all samples."""
    dtype: Dtype = "auto"
    """Number format of the model; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""
    numerics: Numerics = "exact"
    """exact = output does not depend on speculation and company; fast = whole library calls, nothing promised."""
    record_rounds: str = ""
    """File for one JSON line per round, for `outrider replay`; bounded, and it costs some time."""
    probe: Probe = "auto"
    """Start-up probe of exact numerics: auto = once per machine and model, force = now, skip = never."""
    threads: int = 0
    """CPU threads; 0 = PyTorch's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Answer shipped prompts with speculation on and off, and show the difference in speed."""

    model: str = "models/k3-small"
    """Target checkpoint directory, or its name."""
    drafter: str = ""
    """Drafter checkpoint; none = the one shipped with the model. Without any, answers are shown without drafts."""
    max_tokens: int = 96
    """Tokens per answer at most."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    numerics: Numerics = "exact"
    """exact = output does not depend on speculation and company; fast = whole library calls, nothing promised."""
    probe: Probe = "auto"
    """Start-up probe of exact numerics: auto = once per machine and model, force = now, skip = never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchAb:
    """Run the same prompts through engines without a drafter and with one, paired and interleaved."""

    model: Model
    """Target checkpoint directory, or its name under models/."""
    drafter: str
    """Drafter checkpoint directory, or its name under models/."""
    prompts: str = ""
    """JSONL file with question_id, category, sub_category and turns; none = the shipped prompts."""
    tiers: Names = ("low_entropy", "mixed", "high_entropy")
    """Categories to measure, each with cells of its own."""
    concurrency: Ints = (1, 4)
    """Requests in flight, each with cells of its own."""
    prompt_length: Names = ()
    """Tokens of a prompt, such as 256,1k,2k, each with cells of its own; none = prompts as they are."""
    num_prompts: int = 8
    """Prompts per tier, taking turns over sub_category; the same for all arms and concurrencies."""
    max_tokens: int = 128
    """Tokens per answer at most."""
    arms: Names = ("plain", "auto")
    """Of plain (no drafter), off (one that nobody uses), auto, and fixedK such as fixed7; ratios need plain."""
    repeats: int = 3
    """How often each cell is run at least, with the arms taking turns."""
    max_repeats: int = 0
    """How often at most: repeats are added until the ratio is known to 2 %; 0 = four times --repeats."""
    time_budget: float = 0.0
    """Seconds of a cell after which no repeat is added; 0 = none."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    speculation: str = "auto"
    """Drafts per round of the arm spec, which is auto or, with a number, fixed: the form before --arms had names."""
    drafter_fault: str = ""
    """Replace all drafts by random tokens: garbage, or garbage@N from round N of each cell on."""
    dtype: Dtype = "auto"
    """Number format of the models; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""
    numerics: Numerics = "exact"
    """exact = output does not depend on speculation and company; fast = whole library calls, nothing promised."""
    probe: Probe = "auto"
    """Start-up probe of exact numerics: auto = once per machine and model, force = now, skip = never."""
    json: str = ""
    """File for the results."""
    record_rounds: str = ""
    """File for one JSON line per round, the arm before its suffix, for `outrider replay`; it costs some time."""
    record: bool = False
    """Also append the results to benchmarks/ledger.jsonl in the working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchAcceptance:
    """Sample answers under each rule of acceptance and count the drafts that stand."""

    model: Model
    """Target checkpoint directory, or its name under models/."""
    drafter: str
    """Drafter checkpoint directory, or its name under models/."""
    prompts: str
    """JSONL file with question_id, category, sub_category and turns."""
    tiers: Names = ("low_entropy", "mixed", "high_entropy")
    """Categories to measure, each with cells of its own."""
    temperatures: Reals = (0.7, 1.0)
    """Temperatures above 0, each with cells of its own."""
    rules: Names = ("match", "rejection", "block")
    """Rules of acceptance, each a cell of its own."""
    seed: int = 0
    """Of the first prompt; each further prompt draws with the next one."""
    num_prompts: int = 8
    """Prompts per tier, taking turns over sub_category; the same for all temperatures and rules."""
    max_tokens: int = 128
    """Tokens per answer at most."""
    concurrency: int = 4
    """Answers in flight; with exact numerics they do not depend on it."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    speculation: str = "auto"
    """Drafts per round: auto (all of the block) or a number."""
    dtype: Dtype = "auto"
    """Number format of the models; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "unpacked"
    """Routed experts as bfloat16 (unpacked) or as MXFP4 (packed, for models that do not fit); equal values."""
    numerics: Numerics = "exact"
    """exact = output does not depend on speculation and company; fast = whole library calls, nothing promised."""
    probe: Probe = "auto"
    """Start-up probe of exact numerics: auto = once per machine and model, force = now, skip = never."""
    json: str = ""
    """File for the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNumerics:
    """Measure what exact numerics costs: the time of a decode step with exact and with fast numerics, in turns."""

    model: Model
    """Target checkpoint directory, or its name under models/."""
    rows: Ints = (1, 8, 32)
    """Rows of a step, each a line of its own; every row is a sequence that decodes one token."""
    context: int = 128
    """Tokens before the decoded ones."""
    repeats: int = 30
    """Pairs of steps per line, with the two taking turns to go first."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    dtype: Dtype = "auto"
    """Number format of the model; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""
    json: str = ""
    """File for the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStep:
    """Measure one step over rows, slots and contexts against the least time that this machine allows.

    MODEL or --random says what is measured.
    """

    model: Model = ""
    """Target checkpoint directory, or its name under models/."""
    random: str = ""
    """Instead of MODEL: a random pair of the shape k3-60m, k3-200m, k3-truncated or of a .json file."""
    drafter: str = ""
    """Drafter checkpoint, for --synthetic-acceptance; a random pair has its own."""
    rows: Ints = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64)
    """Query rows of the whole step, spread evenly over the slots; fewer rows than slots are skipped."""
    slots: Ints = (1, 4, 8, 16)
    """Sequences of the step."""
    context: Ints = (128, 1024, 4096)
    """Committed tokens of each sequence."""
    repeats: int = 30
    """Turns; in each, every step runs once, and with --synthetic-acceptance one speculative round."""
    synthetic_acceptance: Reals = ()
    """Also run whole rounds in which draft i stands with the i-th rate, given that all before it do."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    dtype: Dtype = "auto"
    """Number format of the model; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""
    numerics: Numerics = "exact"
    """exact = output does not depend on speculation and company; fast = whole library calls, nothing promised."""
    probe: Probe = "auto"
    """Start-up probe of exact numerics: auto = once per machine and model, force = now, skip = never."""
    json: str = ""
    """File for the results."""
    plot: str = ""
    """SVG file for a plot of the steps and their floors."""
    record: bool = False
    """Also append the results to benchmarks/ledger.jsonl in the working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStartup:
    """Measure the time from nothing to the first token, and resident memory, over starts in new processes."""

    model: Model
    """Target checkpoint directory, or its name under models/."""
    drafter: str = ""
    """Drafter checkpoint directory, or its name under models/; none = plain decoding."""
    repeats: int = 3
    """Starts after a first one, which fills the caches of the system and is not counted."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    dtype: Dtype = "auto"
    """Number format of the models; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""
    numerics: Numerics = "exact"
    """exact = output does not depend on speculation and company; fast = whole library calls, nothing promised."""
    probe: Probe = "auto"
    """Start-up probe of exact numerics: auto = once per machine and model, force = now, skip = never."""
    json: str = ""
    """File for the results."""
    record: bool = False
    """Also append the results to benchmarks/ledger.jsonl in the working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measurements."""

    kind: (
        Annotated[BenchAb, tyro.conf.subcommand("ab")]
        | Annotated[BenchNumerics, tyro.conf.subcommand("numerics")]
        | Annotated[BenchAcceptance, tyro.conf.subcommand("acceptance")]
        | Annotated[BenchStep, tyro.conf.subcommand("step")]
        | Annotated[BenchStartup, tyro.conf.subcommand("startup")]
    )
    """What to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Describe a checkpoint from its config.json: layers, parameters, bytes per token and per sequence."""

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PATH")]
    """Directory with a config.json, or a name under models/; weights are not needed."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Write the logits of the last prompt position, all of the vocabulary, as JSON."""

    model: Model
    """Checkpoint directory, or its name under models/."""
    prompt_ids: Ints
    """The prompt as token ids."""
    json: str
    """File to write."""
    dtype: Dtype = "auto"
    """Number format of the model; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""
    numerics: Numerics = "exact"
    """exact = output does not depend on speculation and company; fast = whole library calls, nothing promised."""
    probe: Probe = "auto"
    """Start-up probe of exact numerics: auto = once per machine and model, force = now, skip = never."""
    threads: int = 0
    """CPU threads; 0 = PyTorch's default."""


subcommand = tyro.conf.subcommand
Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Demo, subcommand("demo")]
    | Annotated[ImportGguf, subcommand("import-gguf")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Logits, subcommand("logits")]
    | Annotated[tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[Bench]], subcommand("bench")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Calibrate, subcommand("calibrate")]
    | Annotated[Replay, subcommand("replay")]
)
