"""Both rules with coins against the target's distribution, on tables; and wrong rules that the test must catch.

A round is simulated many times: drafts from a Markov drafter, a verdict, the final token, and then plain
sampling up to a fixed length. The joint distribution of all tokens must be the target's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from outrider.ops.draws import Purpose, draw_keys, uniform
from outrider.ops.rejection import Verdict, accept_block, accept_tokenwise
from outrider.ops.sampling import draw
from outrider.testing.statistics import chi_square_p_value, counts_of

VOCAB, DRAFTS, ROUNDS = 3, 3, 20000
LIKELY, IMPOSSIBLE = 1e-4, 1e-9
RULES = {"rejection": accept_tokenwise, "block": accept_block}
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Verdict]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Distributions after every sequence of up to DRAFTS tokens: ``rows[depth][code]`` is over the vocabulary."""

    rows: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, seed: int, sharpness: float) -> "Table":
        generator = torch.Generator().manual_seed(seed)
        logits = [torch.randn(VOCAB**depth, VOCAB, generator=generator).double() for depth in range(DRAFTS + 1)]
        return cls(rows=tuple((sharpness * row).softmax(-1) for row in logits))

    def joint(self) -> torch.Tensor:
        """Probability of every sequence of DRAFTS + 1 tokens, by code."""
        joint = torch.ones(1, dtype=torch.float64)
        for row in self.rows:
            joint = (joint[:, None] * row).flatten()
        return joint

    def along(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows met along ``tokens`` ``[C, n]``: ``[C, n + 1, V]``, at most DRAFTS + 1 of them."""
        code = torch.zeros(tokens.shape[0], dtype=torch.int64)
        met = [self.rows[0][code]]
        for depth in range(1, min(tokens.shape[1], DRAFTS) + 1):
            code = code * VOCAB + tokens[:, depth - 1]
            met.append(self.rows[depth][code])
        return torch.stack(met, 1)


TARGET = Table.random(1, 1.2)
# Near enough to the target that every accept length is common, and far enough that every wrong rule shows.
DRAFTER = Table(rows=tuple(0.35 * p + 0.65 * q for p, q in zip(TARGET.rows, Table.random(2, 1.5).rows, strict=True)))


def noise(purpose: int, index: int) -> torch.Tensor:
    return draw_keys(torch.arange(ROUNDS), 7, index, purpose)


def sample(probs: torch.Tensor, purpose: int, index: int) -> torch.Tensor:
    return draw(probs.log(), noise(purpose, index), torch.arange(VOCAB))


def drafted() -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[C, G]`` and what each was drawn from ``[C, G, V]``."""
    tokens = torch.zeros(ROUNDS, 0, dtype=torch.int64)
    rows = []
    for index in range(DRAFTS):
        rows.append(DRAFTER.along(tokens)[:, -1])
        tokens = torch.cat((tokens, sample(rows[-1], Purpose.DRAFT, index)[:, None]), 1)
    return tokens, torch.stack(rows, 1)


def finished(tokens: torch.Tensor, verdict: Verdict, purpose: int = Purpose.RECOVER) -> torch.Tensor:
    """Accepted drafts, the final token, then plain sampling; the code of DRAFTS + 1 tokens."""
    final = sample(verdict.final_CV, purpose, 50)
    output = torch.cat((tokens, torch.zeros(ROUNDS, 1, dtype=torch.int64)), 1)
    accepted = verdict.num_accepted_C
    for index in range(DRAFTS + 1):
        plain = sample(TARGET.along(output[:, :index])[:, -1], Purpose.SAMPLE, 60 + index)
        ours = torch.where(accepted == index, final, plain)
        output[:, index] = torch.where(accepted > index, output[:, index], ours)
    return (output * VOCAB ** torch.arange(DRAFTS, -1, -1)).sum(1)


def coins() -> torch.Tensor:
    return torch.stack([uniform(noise(Purpose.ACCEPT, index)) for index in range(DRAFTS)], 1)


def run(rule: Rule, lengths: torch.Tensor | int, handed: torch.Tensor | None = None) -> tuple[float, torch.Tensor]:
    """P-value of the joint distribution, and how many drafts each round accepted."""
    tokens, drawn_from = drafted()
    lengths_C = torch.full((ROUNDS,), lengths) if isinstance(lengths, int) else lengths
    verdict = rule(TARGET.along(tokens), drawn_from if handed is None else handed, tokens, lengths_C, coins())
    codes = finished(tokens, verdict)
    assert (verdict.num_accepted_C <= lengths_C).all()
    return chi_square_p_value(counts_of(codes, VOCAB ** (DRAFTS + 1)), TARGET.joint()), verdict.num_accepted_C


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", range(DRAFTS + 1))
def test_the_output_has_the_distribution_of_the_target_at_every_length(rule: str, length: int) -> None:
    """Length below DRAFTS: the drafter has a row for the next draft, which was not submitted."""
    p_value, accepted = run(RULES[rule], length)
    assert p_value > LIKELY
    assert counts_of(accepted, length + 1).min() > ROUNDS / 50, "an accept length was hardly ever seen"


@pytest.mark.parametrize("rule", RULES)
def test_every_accept_length_leaves_the_right_rest(rule: str) -> None:
    """Tokens before and after the cut, for each accept length: Bayes on the coins of that length.

    Given the tokens emitted and the accept length, the tokens after the final one are plain samples.
    """
    tokens, drawn_from = drafted()
    lengths = torch.full((ROUNDS,), DRAFTS)
    verdict = RULES[rule](TARGET.along(tokens), drawn_from, tokens, lengths, coins())
    codes = finished(tokens, verdict)
    for accepted in range(DRAFTS):
        chosen = codes[verdict.num_accepted_C == accepted]
        depth = accepted + 1
        prefixes = chosen // VOCAB ** (DRAFTS + 1 - depth)
        for prefix in range(VOCAB**depth):
            following = chosen[prefixes == prefix] // VOCAB ** (DRAFTS - depth) % VOCAB
            if following.numel() > 200:
                assert chi_square_p_value(counts_of(following, VOCAB), TARGET.rows[depth][prefix]) > 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_lengths_that_look_at_earlier_drafts_only_are_harmless(rule: str) -> None:
    """Draft 2 is submitted unless draft 1 is token 0, draft 3 unless draft 2 is token 1: non-anticipating."""
    tokens, _ = drafted()
    lengths = torch.where(tokens[:, 0] == 0, 1, torch.where(tokens[:, 1] == 1, 2, 3))
    assert run(RULES[rule], lengths)[0] > LIKELY


@pytest.mark.parametrize("rule", RULES)
def test_lengths_that_look_at_the_draft_itself_are_caught(rule: str) -> None:
    tokens, _ = drafted()
    assert run(RULES[rule], torch.where(tokens[:, 0] == 0, 0, 3))[0] < IMPOSSIBLE


def test_acceptance_is_the_overlap_and_a_block_accepts_more() -> None:
    _, tokenwise = run(accept_tokenwise, DRAFTS)
    _, block = run(accept_block, DRAFTS)
    overlap = torch.minimum(TARGET.rows[0][0], DRAFTER.rows[0][0]).sum()
    assert abs(float((tokenwise > 0).double().mean() - overlap)) < 0.01
    assert float(block.double().mean()) > float(tokenwise.double().mean()) + 0.01


@pytest.mark.parametrize("rule", RULES)
def test_one_hot_drafts_and_equal_distributions(rule: str) -> None:
    """A deterministic drafter is one whose distribution is certain; a perfect one is never rejected."""
    tokens = torch.tensor([[2, 0, 1]]).expand(ROUNDS, -1)
    certain = torch.nn.functional.one_hot(tokens, VOCAB).double()
    lengths = torch.full((ROUNDS,), DRAFTS)
    verdict = RULES[rule](TARGET.along(tokens), certain, tokens, lengths, coins())
    codes = finished(tokens, verdict)
    assert chi_square_p_value(counts_of(codes, VOCAB ** (DRAFTS + 1)), TARGET.joint()) > LIKELY
    drafts, _ = drafted()
    perfect = TARGET.along(drafts)
    assert RULES[rule](perfect, perfect[:, :-1], drafts, lengths, coins()).num_accepted_C.eq(DRAFTS).all()


def no_residual(*arguments: torch.Tensor) -> Verdict:
    """Draws the final token from p after a rejection too."""
    verdict = accept_tokenwise(*arguments)
    rows = torch.arange(ROUNDS)
    return replace(verdict, final_CV=arguments[0][rows, verdict.num_accepted_C])


def residual_for_the_bonus(target: torch.Tensor, draft: torch.Tensor, *rest: torch.Tensor) -> Verdict:
    """Draws the token after the last submitted draft from the residual of a draft that was not submitted."""
    verdict = accept_tokenwise(target, draft, *rest)
    rows, accepted = torch.arange(ROUNDS), verdict.num_accepted_C
    residual = (target[rows, accepted] - draft[rows, accepted.clamp_max(DRAFTS - 1)]).clamp_min(0)
    return replace(verdict, final_CV=torch.where((accepted < DRAFTS)[:, None], residual, verdict.final_CV))


def accept_by_p_alone(target: torch.Tensor, draft: torch.Tensor, *rest: torch.Tensor) -> Verdict:
    """Forgets to divide by q."""
    return replace(
        accept_tokenwise(target, draft, *rest),
        num_accepted_C=accept_tokenwise(target, torch.ones_like(draft), *rest).num_accepted_C,
    )


def block_by_prefix_alone(
    target: torch.Tensor, draft: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor, coins_CG: torch.Tensor
) -> Verdict:
    """Takes the bar of the whole block, ``P_i``, for every prefix: what remains to be drawn is not weighed."""
    accepted = torch.zeros_like(lengths)
    for length in range(1, DRAFTS + 1):  # a block of this length has P as its last bar
        stands = accept_block(target, draft, ids, lengths.clamp_max(length), coins_CG).num_accepted_C == length
        accepted = torch.where(stands, length, accepted)
    rows = torch.arange(ROUNDS)
    residual = (target[rows, accepted] - draft[rows, accepted.clamp_max(DRAFTS - 1)]).clamp_min(0)
    final = torch.where((accepted < DRAFTS)[:, None], residual, target[rows, accepted])
    return Verdict(num_accepted_C=accepted, final_CV=final)


WRONG = {
    "no residual": (no_residual, DRAFTS),
    "bonus token from a residual": (residual_for_the_bonus, DRAFTS - 1),
    "p without q": (accept_by_p_alone, DRAFTS),
    "block by the prefix alone": (block_by_prefix_alone, DRAFTS),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str) -> None:
    rule, length = WRONG[name]
    assert run(rule, length)[0] < IMPOSSIBLE


@pytest.mark.parametrize("rule", RULES)
def test_a_distribution_without_the_markov_correction_is_caught(rule: str) -> None:
    """Hands over the marginal of each draft instead of what it was drawn from, given the drafts before it."""
    tokens, _ = drafted()
    marginals = torch.stack([counts_of(tokens[:, index], VOCAB).double() / ROUNDS for index in range(DRAFTS)])
    assert run(RULES[rule], DRAFTS, handed=marginals.expand(ROUNDS, -1, -1))[0] < IMPOSSIBLE


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_draft_with_its_softmax_is_caught(rule: str) -> None:
    tokens, rows = torch.zeros(ROUNDS, 0, dtype=torch.int64), []
    for _ in range(DRAFTS):
        rows.append(DRAFTER.along(tokens)[:, -1])
        tokens = torch.cat((tokens, rows[-1].argmax(-1)[:, None]), 1)
    lengths = torch.full((ROUNDS,), DRAFTS)
    verdict = RULES[rule](TARGET.along(tokens), torch.stack(rows, 1), tokens, lengths, coins())
    codes = finished(tokens, verdict)
    assert chi_square_p_value(counts_of(codes, VOCAB ** (DRAFTS + 1)), TARGET.joint()) < IMPOSSIBLE


@pytest.mark.parametrize("rule", RULES)
def test_what_lies_beyond_the_length_is_ignored(rule: str) -> None:
    tokens, drawn_from = (part[:500] for part in drafted())
    lengths = torch.arange(500) % (DRAFTS + 1)
    target = TARGET.along(tokens)
    expected = RULES[rule](target, drawn_from, tokens, lengths, coins()[:500])
    beyond = torch.arange(DRAFTS) >= lengths[:, None]
    rows_beyond = torch.arange(DRAFTS + 1) > lengths[:, None]
    for filler in (torch.nan, 0.0, 1.0):
        verdict = RULES[rule](
            target.masked_fill(rows_beyond[..., None], filler),
            drawn_from.masked_fill(beyond[..., None], filler),
            tokens.masked_fill(beyond, VOCAB - 1),
            lengths,
            coins()[:500],
        )
        assert torch.equal(verdict.num_accepted_C, expected.num_accepted_C)
        assert torch.equal(verdict.final_CV, expected.final_CV)


@pytest.mark.parametrize("rule", RULES)
def test_a_round_does_not_depend_on_its_neighbours(rule: str) -> None:
    tokens, drawn_from = (part[:40] for part in drafted())
    arguments = (TARGET.along(tokens), drawn_from, tokens, torch.arange(40) % (DRAFTS + 1), coins()[:40])
    together = RULES[rule](*arguments)
    for row in range(40):
        alone = RULES[rule](*(part[row : row + 1] for part in arguments))
        assert torch.equal(alone.num_accepted_C[0], together.num_accepted_C[row])
        assert torch.equal(alone.final_CV[0], together.final_CV[row])
