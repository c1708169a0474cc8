"""BlockPredictor against the literal reference, and the exactness it must keep."""

from dataclasses import dataclass, replace

import pytest
import torch

from outrider.errors import ConfigError, EngineFault
from outrider.models.dspark.block import BlockAnchors, BlockPredictor
from outrider.models.dspark.checkpoint import TargetTables, load_model
from outrider.models.dspark.config_json import parse_config
from outrider.models.dspark.kernels import TORCH_BLOCK_KERNELS, choose_block_kernels
from outrider.models.kernels import EXACT_KERNELS
from outrider.ops.linear import linear
from outrider.testing.reference_dspark import ReferenceDSpark, ReferenceShape
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config, write_toy_drafter

PAGE_SIZE = 4
MAX_CONTEXT = 160
F64 = torch.float64

VARIANTS = {
    "vanilla": ToyDrafterOptions(),
    "specforge-yarn": ToyDrafterOptions(family="specforge", yarn_factor=8.0),
    "reduced": ToyDrafterOptions(family="speculators", draft_vocab_size=41, confidence_bias=False),
    "gated": ToyDrafterOptions(markov_kind="gated", tap_norm=True),
    "rnn": ToyDrafterOptions(markov_kind="rnn", confidence="hidden"),
    "dflash": ToyDrafterOptions(markov_rank=0, confidence="none"),
    "anchor-drop": ToyDrafterOptions(family="speculators", extra_config={"sample_from_anchor": False}),
    "sliding": ToyDrafterOptions(layer_types=("sliding_attention", "full_attention"), sliding_window=7),
    "sliding-from-anchor": ToyDrafterOptions(
        family="speculators", layer_types=("sliding_attention", "full_attention"), sliding_window=3
    ),
}


def reference_shape(options: ToyDrafterOptions) -> ReferenceShape:
    sliding = options.layer_types or ()
    return ReferenceShape(
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        eps=options.rms_norm_eps,
        block_rows=options.block_rows,
        first_row=0 if options.extra_config.get("sample_from_anchor", True) else 1,
        mask_token_id=options.mask_token_id,
        rope_theta=options.rope_theta,
        yarn_factor=options.yarn_factor,
        yarn_original=options.yarn_original,
        markov=options.markov_kind if options.markov_rank else "none",
        confidence=options.confidence,
        causal_layers=tuple(i for i, name in enumerate(sliding) if name == "sliding_attention"),
        query_window=None if options.family == "speculators" else options.sliding_window,
        anchor_window=options.sliding_window if options.family == "speculators" else None,
        tap_norm=options.tap_norm,
    )


@dataclass
class Toy:
    options: ToyDrafterOptions
    weights: dict[str, torch.Tensor]
    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    directory: object

    def predictor(
        self, dtype=F64, num_draft_tokens=None, with_confidence=True, block_kernels=TORCH_BLOCK_KERNELS
    ) -> BlockPredictor:
        embedding_VD, head_VD = self.embedding_VD.to(dtype), self.head_VD.to(dtype)
        tables = TargetTables(embedding_VD=embedding_VD, head_VD=head_VD)
        return BlockPredictor(
            load_model(self.directory, tables, dtype=dtype, device=torch.device("cpu")),
            embedding_VD=embedding_VD,
            head=lambda rows: linear(rows, head_VD),
            kernels=EXACT_KERNELS,
            max_context=MAX_CONTEXT,
            num_draft_tokens=num_draft_tokens,
            with_confidence=with_confidence and self.options.confidence != "none",
            block_kernels=block_kernels,
        )

    def reference(self, weights=None, **changes) -> ReferenceDSpark:
        shape = replace(reference_shape(self.options), **changes)
        return ReferenceDSpark(weights or self.weights, shape, self.embedding_VD, self.head_VD)

    def taps(self, generator, num_rows):
        shape = (num_rows, len(self.options.aux_layer_ids), self.options.hidden_size)
        return torch.randn(shape, generator=generator, dtype=F64)


def make_toy(directory, options) -> Toy:
    generator = torch.Generator().manual_seed(7)
    shape = (options.vocab_size, options.hidden_size)
    embedding_VD = torch.randn(shape, generator=generator, dtype=F64)
    head_VD = torch.randn(shape, generator=generator, dtype=F64) / 4
    return Toy(options, write_toy_drafter(directory, options, seed=3), embedding_VD, head_VD, directory)


class Sequences:
    """Flat rows and page tables of a few sequences in one cache, pages in scrambled order."""

    def __init__(self, predictor, num_sequences, *, page_seed=0, poison=True):
        self.predictor = predictor
        pages = MAX_CONTEXT // PAGE_SIZE
        order = torch.randperm(num_sequences * pages, generator=torch.Generator().manual_seed(page_seed))
        self.table = order.view(num_sequences, pages)
        self.cache = predictor.allocate_context(num_sequences * pages * PAGE_SIZE)
        if poison:
            self.cache.rows_2LRJK.fill_(torch.nan)
        self.lengths = [0] * num_sequences

    def observe(self, taps_by_sequence):
        """Store {sequence: taps} in one call."""
        positions, rows, taps = [], [], []
        for sequence, new in taps_by_sequence.items():
            for row in new:
                position = self.lengths[sequence]
                positions.append(position)
                page = int(self.table[sequence, position // PAGE_SIZE])
                rows.append(page * PAGE_SIZE + position % PAGE_SIZE)
                taps.append(row)
                self.lengths[sequence] += 1
        dtype = self.cache.rows_2LRJK.dtype
        self.predictor.store_context(
            self.cache,
            torch.stack(taps).to(dtype),
            torch.tensor(positions),
            torch.tensor(rows),
            max_position=max(positions),
        )

    def propose(self, anchors_by_sequence):
        chosen = list(anchors_by_sequence)
        lengths = [self.lengths[s] for s in chosen]
        return self.predictor.predict(
            self.cache,
            BlockAnchors(
                token_ids_S=torch.tensor([anchors_by_sequence[s] for s in chosen]),
                positions_S=torch.tensor(lengths),
                page_table_SP=self.table[chosen],
                page_size=PAGE_SIZE,
                max_position=max(lengths),
            ),
            keep_logits=True,
        )


def difference(prediction, draft, sequence=0):
    """Largest logit difference to a reference draft; infinite when the number of drafts differs."""
    if len(prediction.logits) != len(draft.logits):
        return float("inf")
    return max(
        float((ours[sequence] - theirs).abs().max())
        for ours, theirs in zip(prediction.logits, draft.logits, strict=True)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_rounds_equal_the_literal_drafter_cold_and_cached(name, tmp_path):
    toy = make_toy(tmp_path, VARIANTS[name])
    reference = toy.reference()
    generator = torch.Generator().manual_seed(11)
    sequences = Sequences(toy.predictor(), 2)
    contexts = [reference.new_context() for _ in range(2)]
    history = [[], []]
    # prompts, then accepted + 1 rows per round, including nothing accepted and everything accepted
    for counts in ((9, 5), (1, 5), (3, 1)):
        new = {s: toy.taps(generator, count) for s, count in enumerate(counts)}
        sequences.observe(new)
        for s in range(2):
            reference.observe(contexts[s], [list(row) for row in new[s]])
            history[s].extend(new[s])
        anchors = {s: int(torch.randint(0, 96, (), generator=generator)) for s in range(2)}
        prediction = sequences.propose(anchors)
        for s in range(2):
            draft = reference.draft(contexts[s], anchors[s])
            assert prediction.block.token_ids_SG[s].tolist() == draft.token_ids
            assert difference(prediction, draft, s) < 1e-10
            if draft.confidence:
                assert prediction.block.confidence_SG[s].tolist() == pytest.approx(draft.confidence, abs=1e-10)
            else:
                assert prediction.block.confidence_SG is None
    cold = Sequences(sequences.predictor, 2, page_seed=5)
    cold.observe({s: torch.stack(history[s]) for s in range(2)})
    again = cold.propose(anchors)
    assert all(torch.equal(a, b) for a, b in zip(again.logits, prediction.logits, strict=True))


MUTATIONS = {
    "row shifted by one": ("vanilla", {"first_row": 1}),
    "anchor-drop read as anchor-first": ("anchor-drop", {"first_row": 0}),
    "yarn dropped": ("specforge-yarn", {"yarn_factor": None}),
    "window ignored": ("sliding", {"query_window": None}),
    "causality ignored": ("sliding", {"causal_layers": ()}),
    "eps of another model": ("vanilla", {"eps": 1e-2}),
    "markov ignored": ("vanilla", {"markov": "none", "confidence": "none"}),
    "mask id of another drafter": ("vanilla", {"mask_token_id": 95}),
}


@pytest.mark.parametrize("mutation", [*MUTATIONS, "taps swapped", "d2t ignored"])
def test_mutations_are_detected(mutation, tmp_path):
    """The comparison above would notice each classic mistake."""
    special = {"taps swapped": "vanilla", "d2t ignored": "reduced"}
    name, changes = MUTATIONS.get(mutation, (special.get(mutation), {}))
    toy = make_toy(tmp_path, VARIANTS[name])
    weights = dict(toy.weights)
    if mutation == "taps swapped":
        first, second, third = weights["fc.weight"].chunk(3, dim=1)
        weights["fc.weight"] = torch.cat((second, first, third), dim=1)
    if mutation == "d2t ignored":
        weights["d2t"] = torch.zeros_like(weights["d2t"])
    taps = toy.taps(torch.Generator().manual_seed(2), 12)
    sequences = Sequences(toy.predictor(), 1)
    sequences.observe({0: taps})
    prediction = sequences.propose({0: 5})
    drafts = []
    for reference in (toy.reference(), toy.reference(weights, **changes)):
        context = reference.new_context()
        reference.observe(context, [list(row) for row in taps])
        drafts.append(reference.draft(context, 5))
    assert difference(prediction, drafts[0]) < 1e-10
    assert difference(prediction, drafts[1]) > 1e-4


def native_kernels(options):
    config = parse_config(toy_drafter_config(options))
    return choose_block_kernels(config, torch.bfloat16, torch.device("cpu"), None)


@pytest.mark.parametrize("name", VARIANTS)
def test_native_forms_agree_with_the_torch_forms(name, tmp_path):
    """One block from cached context in bfloat16: logits within its rounding, and the same drafts where it allows."""
    native = native_kernels(VARIANTS[name])
    if native == TORCH_BLOCK_KERNELS:
        pytest.skip("no native operations here")
    toy = make_toy(tmp_path, VARIANTS[name])
    taps = toy.taps(torch.Generator().manual_seed(2), 90)
    predictions = []
    for kernels in (native, TORCH_BLOCK_KERNELS):
        sequences = Sequences(toy.predictor(torch.bfloat16, block_kernels=kernels), 1)
        sequences.observe({0: taps})
        predictions.append(sequences.propose({0: 5}))
    ours, theirs = predictions
    assert torch.equal(ours.block.token_ids_SG[:, :1], theirs.block.token_ids_SG[:, :1])
    scale = float(theirs.logits[0].double().abs().max())
    assert float((ours.logits[0].double() - theirs.logits[0].double()).abs().max()) < 2.0**-5 * scale
    if theirs.block.confidence_SG is not None:
        assert torch.allclose(ours.block.confidence_SG[:, 0], theirs.block.confidence_SG[:, 0], atol=2.0**-5)
    chosen = torch.stack([logits.max(-1).indices for logits in ours.logits], dim=1)
    if "d2t" in toy.weights:
        chosen = chosen + toy.weights["d2t"][chosen]
    assert torch.equal(chosen, ours.block.token_ids_SG)


@pytest.mark.parametrize("form", [torch.float64, torch.float32, torch.bfloat16, "native"], ids=str)
@pytest.mark.parametrize("name", ["gated", "rnn", "reduced", "sliding"])
def test_neighbours_page_order_and_foreign_memory_change_no_bit(name, form, tmp_path):
    toy = make_toy(tmp_path, VARIANTS[name])
    dtype = torch.bfloat16 if form == "native" else form
    kernels = native_kernels(VARIANTS[name]) if form == "native" else TORCH_BLOCK_KERNELS
    predictor = toy.predictor(dtype, block_kernels=kernels)
    generator = torch.Generator().manual_seed(4)
    taps = [toy.taps(generator, count) for count in (70, 3, 129, 64, 20)]
    together = Sequences(predictor, 5)
    together.observe(dict(enumerate(taps)))
    anchors = {s: 10 + s for s in range(5)}
    batched = together.propose(anchors)
    for s in range(5):
        alone = Sequences(predictor, 1, page_seed=s, poison=s % 2 == 0)
        for begin in range(0, len(taps[s]), 37):  # other chunks, too
            alone.observe({0: taps[s][begin : begin + 37]})
        single = alone.propose({0: anchors[s]})
        assert torch.equal(single.block.token_ids_SG[0], batched.block.token_ids_SG[s])
        assert torch.equal(single.block.confidence_SG[0], batched.block.confidence_SG[s])
        for ours, theirs in zip(single.logits, batched.logits, strict=True):
            assert torch.isfinite(ours).all()
            assert torch.equal(ours[0], theirs[s])
    order = [3, 0, 4]
    subset = together.propose({s: anchors[s] for s in order})
    assert torch.equal(subset.block.token_ids_SG, batched.block.token_ids_SG[order])


def test_markov_follows_target_ids_of_a_reduced_vocabulary(tmp_path):
    toy = make_toy(tmp_path, VARIANTS["reduced"])
    sequences = Sequences(toy.predictor(), 1)
    sequences.observe({0: toy.taps(torch.Generator().manual_seed(2), 6)})
    drafts = sequences.propose({0: 90}).block.token_ids_SG[0]  # an anchor outside the draft vocabulary
    kept = torch.arange(41) + toy.weights["d2t"]
    assert torch.isin(drafts, kept).all()
    assert int(drafts.max()) >= 41  # draft ids would all be below


def test_fewer_drafts_are_the_first_of_the_full_block(tmp_path):
    toy = make_toy(tmp_path, VARIANTS["vanilla"])
    taps = toy.taps(torch.Generator().manual_seed(2), 6)
    predictions = []
    for count in (None, 2):
        sequences = Sequences(toy.predictor(torch.float32, count), 1)
        sequences.observe({0: taps})
        predictions.append(sequences.propose({0: 3}))
    full, short = predictions
    assert torch.equal(short.block.token_ids_SG, full.block.token_ids_SG[:, :2])
    assert torch.equal(short.block.confidence_SG, full.block.confidence_SG[:, :2])
    for wrong in (0, 5):
        with pytest.raises(ConfigError, match=f"num_draft_tokens={wrong}"):
            toy.predictor(torch.float32, wrong)


def test_head_and_chain_run_for_the_asked_drafts_only_and_confidence_on_demand(tmp_path, monkeypatch):
    toy = make_toy(tmp_path, VARIANTS["vanilla"])
    predictor, rows = toy.predictor(num_draft_tokens=2, with_confidence=False), []
    head = predictor._head
    predictor._head = lambda x: rows.append(x.shape[0]) or head(x)
    monkeypatch.setattr("outrider.models.dspark.heads.ConfidenceHead.probability", None)
    sequences = Sequences(predictor, 1)
    sequences.observe({0: toy.taps(torch.Generator().manual_seed(2), 6)})
    prediction = sequences.propose({0: 3})
    assert rows == [2] and len(prediction.logits) == 2
    assert prediction.block.confidence_SG is None


def test_confidence_needs_a_head(tmp_path):
    toy = make_toy(tmp_path, VARIANTS["dflash"])
    tables = TargetTables(embedding_VD=toy.embedding_VD, head_VD=toy.head_VD)
    model = load_model(tmp_path, tables, dtype=F64, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="no confidence head"):
        BlockPredictor(
            model,
            embedding_VD=toy.embedding_VD,
            head=len,
            kernels=EXACT_KERNELS,
            max_context=9,
            with_confidence=True,
        )


def test_nan_drafts_are_ids_in_range(tmp_path):
    """A broken drafter may cost speed, never the round."""
    toy = make_toy(tmp_path, VARIANTS["vanilla"])
    toy.head_VD.fill_(torch.nan)
    sequences = Sequences(toy.predictor(), 1)
    sequences.observe({0: toy.taps(torch.Generator().manual_seed(2), 6)})
    drafts = sequences.propose({0: 3}).block.token_ids_SG
    assert int(drafts.min()) >= 0 and int(drafts.max()) < toy.options.vocab_size


def test_equal_logits_draft_the_lowest_id(tmp_path):
    toy = make_toy(tmp_path, VARIANTS["dflash"])
    toy.head_VD.zero_()
    sequences = Sequences(toy.predictor(torch.float32), 1)
    sequences.observe({0: toy.taps(torch.Generator().manual_seed(2), 2)})
    assert sequences.propose({0: 3}).block.token_ids_SG.tolist() == [[0, 0, 0, 0]]


def test_a_first_token_without_context_drafts(tmp_path):
    toy = make_toy(tmp_path, VARIANTS["vanilla"])
    sequences = Sequences(toy.predictor(), 1)
    draft = toy.reference().draft(toy.reference().new_context(), 8)
    assert sequences.propose({0: 8}).block.token_ids_SG[0].tolist() == draft.token_ids


def test_joining_keeps_names_values_and_memory(tmp_path):
    toy = make_toy(tmp_path, VARIANTS["vanilla"])
    tables = TargetTables(embedding_VD=toy.embedding_VD, head_VD=toy.head_VD)
    model = load_model(tmp_path, tables, dtype=F64, device=torch.device("cpu"))
    BlockPredictor(
        model, embedding_VD=toy.embedding_VD, head=lambda x: x, kernels=EXACT_KERNELS, max_context=MAX_CONTEXT
    )
    state = model.state_dict()
    assert state.keys() == toy.weights.keys()
    assert all(torch.equal(state[name], toy.weights[name]) for name in state)
    attention = model.draft_layers()[0].self_attn
    storage = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == storage


def test_positions_beyond_the_rotary_table_are_refused(tmp_path):
    toy = make_toy(tmp_path, VARIANTS["vanilla"])
    sequences = Sequences(toy.predictor(), 1)
    sequences.lengths = [MAX_CONTEXT]
    with pytest.raises(EngineFault, match="max_context=160"):
        sequences.propose({0: 1})
