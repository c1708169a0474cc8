"""Gate: reference cross check. Target and drafter against literal models that share no code with them."""

from dataclasses import dataclass, replace

import pytest
import torch

from outrider.batch import DraftBlock
from outrider.models.dspark.block import Prediction
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.speculative.drafter import Anchors, DSparkDrafter
from outrider.testing.golden import GOLDEN_SEED
from outrider.testing.reference_dspark import ReferenceDSpark, ReferenceShape
from outrider.testing.reference_k3 import ReferenceOutput, reference_forward
from outrider.testing.scripted import ScriptedDrafter, random_drafts
from outrider.testing.toy import deep_toy, toy_config, toy_tensors
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter
from outrider.testing.workbench import Company

pytestmark = pytest.mark.gates
TOLERANCE = 1e-9
AUX_LAYERS, MAX_LEN = (1, 6, 12), 64
SHAPE = ReferenceShape(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    eps=1e-5,
    block_rows=4,
    first_row=0,
    mask_token_id=256,
    rope_theta=10000.0,
    yarn_factor=8.0,
    yarn_original=16,
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The literal target over a whole stream, prompt of 18 tokens and all but the last output token."""

    token_ids: tuple[int, ...]
    num_prompt: int
    output: ReferenceOutput


@pytest.fixture(scope="module")
def reference(lab) -> Reference:  # type: ignore[no-untyped-def]
    here = lab(torch.float64)
    prompt = here.asked[1].prompt_token_ids
    token_ids = prompt + here.alone.token_ids["r1"]
    output = reference_forward(toy_tensors(deep_toy(), GOLDEN_SEED), toy_config(deep_toy()), token_ids[:-1])
    return Reference(token_ids=token_ids, num_prompt=len(prompt), output=output)


def test_target_cross_check(lab, reference: Reference) -> None:
    """Logits of prompt, verify and bonus rows and the final KDA state, in company, with drafts cut at random."""
    here = lab(torch.float64)
    drafter = ScriptedDrafter(5, random_drafts(here.right, 250, 0.7, seed=8))
    trace = here.bench.run(here.asked, drafter, Company(seqs=3, step_rows=24))
    last = len(reference.token_ids) - 1
    for position in range(reference.num_prompt - 1, last):
        found, expected = trace.logits["r1", position], reference.output.logits_TV[position]
        assert float((found - expected).abs().max()) < TOLERANCE
        assert int(expected.argmax()) == reference.token_ids[position + 1]
    layers = here.bench.target.config.kda_layers
    state_LHVK = trace.states["r1", last].recurrent.state_LHVK
    assert len(layers) == len(state_LHVK) == 10
    for index, layer in enumerate(layers):
        found, expected = state_LHVK[index].transpose(1, 2), reference.output.kda_states[layer]
        assert float((found - expected).abs().max()) < TOLERANCE


class GuidedDrafter(DSparkDrafter):
    """Drafts with DSpark and keeps that; sends the right drafts to the target, so that rounds bring many rows."""

    def __init__(self, predictor, right, token_ids) -> None:  # type: ignore[no-untyped-def]
        super().__init__(predictor, num_cache_rows=MAX_LEN)
        self.proposed: list[tuple[int, Prediction]] = []
        self._right, self._token_ids = right, token_ids
        predict = predictor.predict

        def keep(context, anchors):  # type: ignore[no-untyped-def]
            prediction = predict(context, anchors)
            self.proposed.append((anchors.max_position, prediction))
            return prediction

        predictor.predict = keep

    def propose(self, anchors: Anchors) -> DraftBlock:
        super().propose(anchors)
        drafts = self._right(self._token_ids[: anchors.positions[0] + 1], self.num_draft_tokens)
        return DraftBlock(token_ids_SG=torch.tensor([drafts]), confidence_SG=None)


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """What the engine's drafter proposed for the stream, and the literal drafter with the literal taps."""

    proposed: list[tuple[int, Prediction]]
    drafter: ReferenceDSpark
    taps_TAD: torch.Tensor
    token_ids: tuple[int, ...]

    def differs(self, proposal: int, *, anchor: int | None = None, drafter=None, taps_TAD=None) -> bool:  # type: ignore[no-untyped-def]
        """Whether the engine's proposal is another than that of the literal drafter, changed as given."""
        position, prediction = self.proposed[proposal]
        drafter = drafter or self.drafter
        context = drafter.new_context()
        rows_TAD = (self.taps_TAD if taps_TAD is None else taps_TAD)[:position]
        drafter.observe(context, [list(row_AD.unbind()) for row_AD in rows_TAD])
        draft = drafter.draft(context, self.token_ids[position] if anchor is None else anchor)
        pairs = list(zip(prediction.logits, draft.logits, strict=True))
        same_logits = all(float((ours[0] - theirs).abs().max()) < TOLERANCE for ours, theirs in pairs)
        return not same_logits or prediction.block.token_ids_SG[0].tolist() != draft.token_ids


@pytest.fixture(scope="module")
def drafted(lab, reference: Reference, tmp_path_factory) -> Drafted:  # type: ignore[no-untyped-def]
    here = lab(torch.float64)
    target, directory = here.bench.target, tmp_path_factory.mktemp("drafter")
    options = ToyDrafterOptions(
        family="specforge",
        hidden_size=64,
        vocab_size=257,
        mask_token_id=SHAPE.mask_token_id,
        num_target_layers=14,
        aux_layer_ids=AUX_LAYERS,
        yarn_factor=SHAPE.yarn_factor,
        yarn_original=SHAPE.yarn_original,
    )
    weights = write_toy_drafter(directory, options, seed=3)
    tables = TargetTables(embedding_VD=target.embedding.detach(), head_VD=target.lm_head.detach())
    predictor = load_predictor(directory, target, tables, max_context=MAX_LEN)
    drafter = GuidedDrafter(predictor, here.right, reference.token_ids)
    assert here.bench.run([here.asked[1]], drafter).stream("r1") == here.alone.stream("r1")
    return Drafted(
        proposed=drafter.proposed,
        drafter=ReferenceDSpark(weights, SHAPE, tables.embedding_VD, tables.head_VD),
        taps_TAD=reference.output.taps(predictor.config.aux_layer_ids, drafter.aux_hidden_stream),
        token_ids=reference.token_ids,
    )


def test_dspark_reference_cross_check(drafted: Drafted) -> None:
    """Round 1: 18 context rows cold. Round 2: five fresh rows, committed from one verify span."""
    assert [position for position, _ in drafted.proposed] == [18, 23]
    assert not drafted.differs(0)
    assert not drafted.differs(1)


@pytest.mark.parametrize("mistake", ["shifted row", "swapped taps", "no YaRN", "stale anchor", "one row short"])
def test_cross_check_notices(drafted: Drafted, mistake: str) -> None:
    """A check that passes everything proves nothing: the literal drafter is changed, one mistake at a time."""
    taps_TAD, drafter = drafted.taps_TAD, drafted.drafter
    changes = {
        "shifted row": {"taps_TAD": taps_TAD.roll(1, dims=0)},
        "swapped taps": {"taps_TAD": taps_TAD.flip(1)},
        "no YaRN": {
            "drafter": ReferenceDSpark(
                drafter.weights, replace(SHAPE, yarn_factor=None), drafter.embedding_VD, drafter.head_VD
            )
        },
        "stale anchor": {"anchor": drafted.token_ids[17]},
        "one row short": {"taps_TAD": torch.cat([taps_TAD[:17], taps_TAD[16:17]])},
    }
    assert drafted.differs(0, **changes[mistake])
