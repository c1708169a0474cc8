"""A step from a recording gives the bits of the same step run eagerly, whatever happened in between."""

import random
from dataclasses import dataclass

import pytest
import torch

from outrider.cache.cache_set import CacheBudget, CacheSet
from outrider.engine import batching
from outrider.engine.batching import PageTable, StepDrafts, StepSpans, build_batch
from outrider.ops.native.library import library
from outrider.plan import ScheduledSequence

pytestmark = pytest.mark.gates
NATIVE_TOYS = (
    "k3",
    "deep",
    "kimi_linear",
    "plain residual, no latent, no shared expert",
    "softplus, low-rank gate, unbounded situ",
)
CPU = torch.device("cpu")
NUM_SLOTS, PAGE_SIZE, MAX_TOKENS, MAX_DRAFTS = 4, 8, 200, 3


@pytest.fixture(autouse=True)
def needs_native_forms():
    if library() is None:
        pytest.skip("steps are recorded with native operations only")


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def load(toy, name, *, taps=((), "mixture")):
    model = toy(name).load(torch.bfloat16, "packed" if toy(name).options.quantized else "unpacked")
    model.set_aux_layers(*taps)
    return model


@dataclass
class Bench:
    """Caches of their own around a model; sequences that are prefilled, stepped and replaced at random."""

    model: object
    dice: random.Random

    def __post_init__(self):
        pages = -(-MAX_TOKENS // PAGE_SIZE)
        budget = CacheBudget(
            num_pages=NUM_SLOTS * pages,
            page_size=PAGE_SIZE,
            num_slots=NUM_SLOTS,
            max_step_rows=NUM_SLOTS * (1 + MAX_DRAFTS),
        )
        self.caches = CacheSet.build(self.model.cache_layouts, budget, CPU)
        self.table = PageTable(num_slots=NUM_SLOTS, max_pages=pages, page_size=PAGE_SIZE, device=CPU)
        ids = self.dice.sample(range(NUM_SLOTS * pages), NUM_SLOTS * pages)
        self.pages = [tuple(ids[slot * pages : (slot + 1) * pages]) for slot in range(NUM_SLOTS)]
        self.lengths = [0] * NUM_SLOTS

    def item(self, slot, tokens, *, is_prompt):
        return ScheduledSequence(
            request_id=str(slot), state_slot=slot, page_ids=self.pages[slot], start_position=self.lengths[slot],
            query_token_ids=tokens, draft_budget=MAX_DRAFTS, is_prompt=is_prompt, wants_logits=True, is_first=False,
        )  # fmt: skip

    def tokens(self, count):
        return tuple(self.dice.randrange(self.model.vocab_size) for _ in range(count))

    def start(self, slot):
        """A new sequence; its prompt ends near the border of a page or of a key tile as often as not."""
        self.caches.reset((slot,))
        self.lengths[slot] = 0
        self.table.assign(slot, self.pages[slot])
        prompt = self.tokens(self.dice.choice((1, 5, 60, 63, 64, 70, 124)))
        self.forward([self.item(slot, prompt, is_prompt=True)], [0])
        self.lengths[slot] = len(prompt)

    def forward(self, items, drafts):
        block = torch.tensor([self.tokens(MAX_DRAFTS) for _ in items], dtype=torch.int64)
        rows = tuple(self.dice.sample(range(len(items)), len(items)))
        with torch.inference_mode():
            batch = build_batch(
                StepSpans(items=tuple(items), verify_lengths=tuple(drafts)),
                StepDrafts(token_ids_SG=block, block_rows=rows),
                self.table,
            )
            return batch, self.model.forward(batch, self.caches)

    def step(self):
        """One step of some sequences with some drafts each; commits some of the rows."""
        slots = self.dice.sample(range(NUM_SLOTS), self.dice.choice((1, 1, 2, 4)))
        for slot in slots:
            if self.lengths[slot] == 0 or self.lengths[slot] > MAX_TOKENS - 8 or self.dice.random() < 0.05:
                self.start(slot)
        drafts = [self.dice.choice((0, MAX_DRAFTS)) for _ in slots]
        if self.dice.random() < 0.3:
            drafts = [self.dice.randrange(MAX_DRAFTS + 1) for _ in slots]
        batch, output = self.forward([self.item(slot, self.tokens(1), is_prompt=False) for slot in slots], drafts)
        counts = [1 + self.dice.randrange(n + 1) for n in drafts]
        self.caches.commit(batch, torch.tensor(counts))
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count
        return output

    def everything(self):
        return (self.caches.latents._rows_LRC, *self.caches.recurrent._tensors())


def run(model, seed, num_steps, *, paused=False, before=lambda _: None):
    """Outputs of all steps, kept as they are until the end, and the caches after them."""
    bench = Bench(model, random.Random(seed))
    outputs = []
    for number in range(num_steps):
        before(number)
        if paused:
            with model.steps.paused():
                outputs.append(bench.step())
        else:
            outputs.append(bench.step())
    tensors = [part for output in outputs for part in (output.logits_NV, output.aux_hidden_TAD) if part is not None]
    return tensors + list(bench.everything())


def same(ours, theirs):
    assert len(ours) == len(theirs)
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in NATIVE_TOYS), ("k3", 2)], indirect=["threads"])
def test_steps_from_recordings_give_the_bits_of_eager_steps(toy, name, threads):
    model = load(toy, name)
    eager = run(model, 1, 45, paused=True)
    assert model.steps.num_recorded == 0
    # Results of earlier steps are compared after all later ones: no step may touch them.
    replayed = run(model, 1, 45, before=lambda _: model.steps.poison())
    assert model.steps.refusal is None
    assert model.steps.num_replayed > 15
    assert same(replayed, eager)


@pytest.mark.parametrize("taps", [((-1, 0, 3), "mixture"), ((1, 7), "mixture"), ((0, 7), "prefix")])
def test_taps_are_part_of_a_recording(toy, taps):
    model = load(toy, "k3", taps=taps)
    assert model.num_layers == 8
    eager = run(model, 2, 40, paused=True)
    replayed = run(model, 2, 40, before=lambda _: model.steps.poison())
    assert model.steps.refusal is None
    assert model.steps.num_replayed > 10
    assert same(replayed, eager)


def test_other_taps_are_recorded_anew(toy):
    model = load(toy, "k3")
    bench = Bench(model, random.Random(3))
    bench.start(0)
    item = bench.item(0, (7,), is_prompt=False)
    for _ in range(3):
        _, output = bench.forward([item], [0])
    assert (model.steps.num_recorded, model.steps.num_replayed) == (1, 1)
    assert output.aux_hidden_TAD is None
    model.set_aux_layers((2,), "mixture")
    _, tapped = bench.forward([item], [0])
    assert model.steps.num_recorded == 2
    assert tapped.aux_hidden_TAD.shape == (1, 1, model.hidden_size)
    assert torch.equal(tapped.logits_NV, output.logits_NV)


def test_weights_that_were_prepared_again_are_recorded_anew(toy):
    model = load(toy, "k3")
    bench = Bench(model, random.Random(4))
    bench.start(0)
    item = bench.item(0, (7,), is_prompt=False)
    for _ in range(3):
        _, before = bench.forward([item], [0])
    assert model.steps.num_replayed == 1
    with torch.no_grad():
        model.lm_head.mul_(2)
    model.prepare()
    _, after = bench.forward([item], [0])
    assert torch.equal(after.logits_NV, 2 * before.logits_NV)
    assert model.steps.num_recorded == 2


def test_engines_that_share_a_model_do_not_disturb_each_other(toy):
    """Each has its caches and places; their steps alternate, and one of them goes away."""
    model = load(toy, "k3")
    with model.steps.paused():
        expected = [run(model, seed, 24) for seed in (5, 6)]
    benches = [Bench(model, random.Random(seed)) for seed in (5, 6)]
    outputs = [[], []]
    for number in range(24):
        for index, bench in enumerate(benches):
            outputs[index].append(bench.step().logits_NV)
        if number == 12:  # a third one comes and goes, with the memory of its caches
            run(model, 7, 8)
    for index, bench in enumerate(benches):
        assert same([*outputs[index], *bench.everything()], expected[index])
    assert model.steps.num_replayed > 10


def test_another_number_of_threads_is_recorded_anew(toy):
    model = load(toy, "k3")
    bench = Bench(model, random.Random(8))
    bench.start(0)
    item = bench.item(0, (7,), is_prompt=False)
    before = torch.get_num_threads()
    try:
        for count, recorded in ((1, 1), (2, 2)):
            torch.set_num_threads(count)
            for _ in range(2):
                bench.forward([item], [0])
            assert model.steps.num_recorded == recorded
    finally:
        torch.set_num_threads(before)


def test_places_that_were_given_up_change_nothing(toy, monkeypatch):
    """With room for three shapes only, recordings come and go all the time."""
    monkeypatch.setattr(batching, "MAX_PLACES", 3)
    model = load(toy, "k3")
    eager = run(model, 9, 60, paused=True)
    replayed = run(model, 9, 60)
    assert same(replayed, eager)
    assert model.steps.num_recorded > 3


def test_memory_is_bounded_by_the_largest_step(toy):
    model = load(toy, "k3")
    run(model, 10, 60)
    assert model.steps.num_recorded > 5
    assert model.steps.scratch_bytes == 1 << 20


def test_an_operation_of_torch_is_refused_by_name_and_runs_eagerly_for_ever(toy, caplog):
    model = load(toy, "k3")
    product = model.layers[2].ffn.linear

    def doubled(x, weight):
        return product(x, weight) * 2

    model.layers[2].ffn.linear = doubled
    eager = run(model, 11, 30, paused=True)
    with caplog.at_level("INFO"):
        tried = run(model, 11, 30)
    assert same(tried, eager)
    assert model.steps.num_recorded == model.steps.num_replayed == 0
    assert model.steps.refusal == "aten.mul.Tensor"
    assert [record.message for record in caplog.records if "recorded" in record.message] == [
        "steps run eagerly, as they cannot be recorded: aten.mul.Tensor"
    ]


def test_a_tensor_that_is_kept_is_refused(toy):
    model = load(toy, "k3")
    kept = []
    inner = model.layers[1].ffn.forward
    model.layers[1].ffn.forward = lambda x: kept.append(inner(x)) or kept[-1]
    run(model, 12, 20)
    assert "outlive the step" in model.steps.refusal


def test_the_environment_turns_recordings_off(toy, monkeypatch):
    monkeypatch.setenv("OUTRIDER_RECORD", "0")
    model = load(toy, "k3")
    run(model, 13, 20)
    assert model.steps.num_recorded == 0
    assert model.steps.refusal is None


def test_no_recording_for_torch_forms(toy):
    model = toy("k3").load(torch.float32)
    run(model, 14, 20)
    assert model.steps.num_recorded == 0
    assert model.steps.refusal is None
