"""Tensors whose rows or columns are in another order than those of the tensors they work with.

Trained matrices that share an axis share its strong and weak places: an MLP neuron that reads much also writes much,
a rotary channel that queries use is one that keys use, a token that is seen often has large rows in both Markov
matrices. A tensor in a wrong order loses that link, while the others keep it. Nothing is named without a link that
holds beside those that do not, so an untrained drafter is not accused.

Dims: I MLP width, H query heads, J key heads, K head width, r Markov rank.
"""

import math
from collections.abc import Mapping

import torch

from outrider.bench.pair_doctor import Problem
from outrider.models.dspark.config import DSparkConfig, MarkovKind

__all__ = ["misordered_tensors"]

NO_LINK = 3.0  # rank correlation in standard errors: up to here chance explains it
STRONG_LINK = 6.0  # from here on it does not
TRAINED_SPREAD = 2.0  # spread of row sizes over that of random rows


def misordered_tensors(stored: Mapping[str, torch.Tensor], config: DSparkConfig) -> tuple[Problem, ...]:
    """Tensors that lost their links, by layer; ``stored`` holds all parameters under their flat names."""
    problems: list[Problem] = []
    for layer in range(config.num_layers):
        problems += _misordered_in_mlp(stored, f"layers.{layer}.mlp.")
        problems += _misordered_in_attention(stored, f"layers.{layer}.self_attn.", config)
    if config.markov is not MarkovKind.NONE:
        problems += _misordered_markov(stored)
    return tuple(problems)


def _misordered_in_mlp(stored: Mapping[str, torch.Tensor], prefix: str) -> list[Problem]:
    """Of gate and up (rows) and down (columns), the one that fits neither of the other two."""
    sizes = {
        "gate_proj": _sizes(stored[prefix + "gate_proj.weight"], 1),
        "up_proj": _sizes(stored[prefix + "up_proj.weight"], 1),
        "down_proj": _sizes(stored[prefix + "down_proj.weight"], 0),
    }
    for odd, odd_I in sizes.items():
        one, other = (name for name in sizes if name != odd)
        kept, lost = _link(sizes[one], sizes[other]), [_link(odd_I, sizes[name]) for name in (one, other)]
        if kept >= STRONG_LINK and max(lost) <= NO_LINK:
            return [_problem(f"{prefix}{odd}.weight", f"{one} and {other}", lost, kept)]
    return []


def _misordered_in_attention(stored: Mapping[str, torch.Tensor], prefix: str, config: DSparkConfig) -> list[Problem]:
    """Of queries and keys, the one whose channels fit neither the other nor its own norm."""
    head_dim = config.head_dim
    sizes, norms = {}, {}
    for name in ("q", "k"):
        sizes[name] = _sizes(stored[f"{prefix}{name}_proj.weight"], 1).view(-1, head_dim)
        norms[name] = stored[f"{prefix}{name}_norm.weight"].double().cpu().expand_as(sizes[name])
    groups = config.num_heads // config.num_kv_heads
    between = _link(sizes["q"], sizes["k"].repeat_interleave(groups, dim=0))
    own = {name: _link(sizes[name], norms[name]) for name in sizes}
    for odd, other in (("q", "k"), ("k", "q")):
        if between <= NO_LINK and own[odd] <= NO_LINK and own[other] >= STRONG_LINK:
            partners = f"{other}_proj and {odd}_norm"
            return [_problem(f"{prefix}{odd}_proj.weight", partners, [between, own[odd]], own[other])]
    return []


def _misordered_markov(stored: Mapping[str, torch.Tensor]) -> list[Problem]:
    """Rows of the two Markov matrices belong to tokens; each is trained, yet they disagree on which are large."""
    w1_Vr, w2_Ur = stored["markov_head.markov_w1.weight"], stored["markov_head.markov_w2.weight"]
    ids_U = torch.arange(w2_Ur.shape[0]) + (stored["d2t"].cpu() if "d2t" in stored else 0)
    one_U, other_U = _sizes(w1_Vr, 1)[ids_U], _sizes(w2_Ur, 1)
    by_chance = math.sqrt(2 / w1_Vr.shape[1])  # of the log of a mean of r squares
    link = _link(one_U, other_U)
    if link > NO_LINK or min(float(one_U.std()), float(other_U.std())) < TRAINED_SPREAD * by_chance:
        return []
    return [_problem("markov_head.markov_w1.weight or markov_w2.weight", "the other", [link], None)]


def _sizes(weight: torch.Tensor, summed_dim: int) -> torch.Tensor:
    """Log mean square of every row (1) or column (0)."""
    return weight.detach().double().cpu().pow(2).mean(summed_dim).clamp_min(1e-30).log()


def _link(one: torch.Tensor, other: torch.Tensor) -> float:
    """Spearman rank correlation in standard errors of chance, without its sign."""
    ranks = [sizes.flatten().argsort().argsort().double() for sizes in (one, other)]
    a, b = (each - each.mean() for each in ranks)
    scale = float(a.norm() * b.norm())
    return abs(float((a * b).sum())) / scale * math.sqrt(a.numel() - 1) if scale else 0.0


def _problem(name: str, partners: str, lost: list[float], kept: float | None) -> Problem:
    listed = " and ".join(f"{link:.1f}" for link in lost)
    held = "" if kept is None else f", while the others agree at {kept:.1f}"
    return Problem(
        code="tensor",
        found=f"{name} in an order that does not fit {partners}: rank correlation {listed} standard errors{held}",
        expected="one order of the shared axis",
        remedy="convert this tensor again from its source",
    )
