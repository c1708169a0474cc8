"""The commands that check a pair or talk to it, as frozen records for tyro; see `outrider.cli.arguments`."""

from dataclasses import dataclass

from outrider.cli.flags import Dtype, Experts, Model, Numerics, Probe

__all__ = ["Chat", "Doctor", "Verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Check a drafter against its target: files, conventions measured on the target's texts, acceptance, cost."""

    model: Model
    """Target checkpoint directory, or its name under models/."""
    drafter: str
    """Drafter checkpoint directory, or its name under models/."""
    prompts: str = ""
    """JSONL file with question_id, category, sub_category and turns; none = the shipped prompts."""
    anchors: int = 2000
    """Positions of the target's texts at which the drafter is measured, at least."""
    max_tokens: int = 160
    """Tokens per text at most."""
    json: str = ""
    """File for the results."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Talk to a model, line by line; /spec on|off, /stats, /reset and /quit are commands."""

    model: Model
    """Checkpoint directory, or its name under models/."""
    drafter: str = ""
    """DSpark checkpoint directory, or its name under models/; none = the one shipped with the model, if there is."""
    system: str = ""
    """Text of a system message that every conversation begins with."""
    max_tokens: int = 512
    """Tokens per answer at most."""
    temperature: float = 0.0
    """0 = greedy; above, the larger the more random."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together reach this probability; 1 = from all."""
    seed: int | None = None
    """What the draws depend on; none = a fresh one per answer."""
    threads: int = 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Check that speculation changes no token: every prompt, with and without drafts, over a grid of settings."""

    model: Model
    """Target checkpoint directory, or its name under models/."""
    drafter: str
    """Drafter checkpoint directory, or its name under models/."""
    prompts: str = ""
    """JSONL file with question_id, category, sub_category and turns; none = the shipped prompts."""
    max_tokens: int = 32
    """Tokens per answer at most."""
    full: bool = False
    """Every combination of the grid instead of a selection that covers each value."""
    inject: str = ""
    """Plant a known fault, which must then be found: any other name lists them."""
    taps: bool = False
    """Also run the drafter on the target's layers one earlier and one later, and compare acceptance."""
    json: str = ""
    """File for the results."""
    threads: int = 1
    """CPU threads; 0 = PyTorch's default."""
    dtype: Dtype = "auto"
    """Number format of the models; auto = that of the checkpoint."""
    device: str = "cpu"
    """PyTorch device."""
    experts: Experts = "auto"
    """Routed experts kept as bfloat16 (unpacked) or as MXFP4 (packed); equal values. auto = the faster form here."""
