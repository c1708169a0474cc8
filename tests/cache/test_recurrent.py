"""The delta log: commit equals stepping, bit for bit, and nothing else has any effect."""

import pytest
import torch

from outrider.batch import ForwardBatch, SpanGroup
from outrider.cache import CacheBudget, CacheSet, PagedLayout, RecurrentCache, RecurrentLayout
from outrider.errors import ConfigError
from outrider.ops.kda import kda_update

LAYERS, SLOTS, HEADS, VALUE, KEY, WINDOW, CHANNELS = 3, 6, 2, 5, 4, 3, 7
DTYPES = [(torch.float64, torch.float64), (torch.float32, torch.bfloat16)]


def make_cache(state_dtype: torch.dtype, conv_dtype: torch.dtype, max_step_rows: int = 24) -> RecurrentCache:
    return RecurrentCache(
        num_layers=LAYERS,
        num_slots=SLOTS,
        max_step_rows=max_step_rows,
        state_shape=(HEADS, VALUE, KEY),
        conv_shape=(WINDOW, CHANNELS),
        state_dtype=state_dtype,
        conv_dtype=conv_dtype,
        device=torch.device("cpu"),
    )


def group(slots: list[int], lengths: list[int], first_row: int = 0) -> SpanGroup:
    width = max(lengths, default=0)
    padded = torch.zeros((len(lengths), width), dtype=torch.int64)
    valid = torch.zeros((len(lengths), width), dtype=torch.bool)
    begin = 0
    for sequence, length in enumerate(lengths):
        padded[sequence, :length] = torch.arange(begin, begin + length)
        valid[sequence, :length] = True
        begin += length
    return SpanGroup(
        rows_T=torch.arange(first_row, first_row + begin),
        state_slots_S=torch.tensor(slots, dtype=torch.int64),
        lengths=tuple(lengths),
        starts=(0,) * len(lengths),
        padded_rows_SM=padded,
        valid_SM=valid,
        limits_SM=torch.ones_like(padded),
        num_keys_S=torch.tensor(lengths, dtype=torch.int64),
    )


def make_batch(slots: list[int], lengths: list[int]) -> ForwardBatch:
    num_rows = sum(lengths)
    rows_T = torch.zeros(num_rows, dtype=torch.int64)
    return ForwardBatch(
        token_ids_T=rows_T,
        positions_T=rows_T,
        context_lens_T=rows_T,
        sequence_T=rows_T,
        slot_mapping_T=rows_T,
        page_table_SP=rows_T[:, None],
        logits_rows_N=rows_T,
        chunk=group([], []),
        step=group(slots, lengths),
        page_size=4,
        max_context=0,
    )


class Rows:
    """Random log rows of one sequence, for all layers."""

    def __init__(self, seed: int, length: int, state_dtype: torch.dtype, conv_dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.u = torch.randn((LAYERS, length, HEADS, VALUE), generator=generator, dtype=state_dtype)
        self.k = torch.randn((LAYERS, length, HEADS, KEY), generator=generator, dtype=state_dtype)
        self.decay = torch.rand((LAYERS, length, HEADS, KEY), generator=generator, dtype=state_dtype)
        self.inputs = torch.randn((LAYERS, length, CHANNELS), generator=generator).to(conv_dtype)

    def poison_after(self, count: int) -> None:
        for tensor in (self.u, self.k, self.decay, self.inputs):
            tensor[:, count:] = torch.nan


def seed_state(cache: RecurrentCache) -> None:
    generator = torch.Generator().manual_seed(7)
    for layer in range(LAYERS):
        state, window = cache.state(layer), cache.conv_window(layer)
        cache.store(
            layer,
            torch.arange(SLOTS),
            torch.randn(state.shape, generator=generator, dtype=state.dtype),
            torch.randn(window.shape, generator=generator).to(window.dtype),
        )


def write(
    cache: RecurrentCache, batch: ForwardBatch, spans: list[Rows], begin: int = 0, end: int | None = None
) -> None:
    for layer in range(LAYERS):
        cache.write_log(
            layer,
            batch,
            torch.cat([rows.u[layer, begin:end] for rows in spans]),
            torch.cat([rows.k[layer, begin:end] for rows in spans]),
            torch.cat([rows.decay[layer, begin:end] for rows in spans]),
            torch.cat([rows.inputs[layer, begin:end] for rows in spans]),
        )


def snapshot(cache: RecurrentCache) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.stack([cache.state(layer) for layer in range(LAYERS)])
    windows = torch.stack([cache.conv_window(layer) for layer in range(LAYERS)])
    return states, windows


def textbook(cache: RecurrentCache, slot: int, rows: Rows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    state = torch.stack([cache.state(layer)[slot] for layer in range(LAYERS)])
    window = torch.stack([cache.conv_window(layer)[slot] for layer in range(LAYERS)])
    for row in range(count):
        state = kda_update(state, rows.decay[:, row], rows.u[:, row], rows.k[:, row])
        window = torch.cat([window[:, 1:], rows.inputs[:, row : row + 1]], dim=1)
    return state, window


@pytest.mark.parametrize("dtypes", DTYPES, ids=["float64", "bfloat16"])
@pytest.mark.parametrize("committed", [[1, 1, 1], [8, 1, 3], [2, 1, 5], [0, 1, 2]])
def test_commit_equals_stepping_and_touches_its_slots_only(
    committed: list[int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    slots, lengths = [4, 0, 2], [8, 1, 5]
    cache, stepped = make_cache(*dtypes), make_cache(*dtypes)
    seed_state(cache)
    seed_state(stepped)
    before = snapshot(cache)
    spans = [Rows(seed, length, *dtypes) for seed, length in enumerate(lengths)]
    expected = [textbook(cache, slot, rows, n) for slot, rows, n in zip(slots, spans, committed, strict=True)]
    for slot, rows, count in zip(slots, spans, committed, strict=True):
        single = make_batch([slot], [1])
        for row in range(count):
            write(stepped, single, [rows], row, row + 1)
            stepped.commit(single, torch.tensor([1]))
    for rows, count in zip(spans, committed, strict=True):
        rows.poison_after(count)
    batch = make_batch(slots, lengths)
    write(cache, batch, spans)
    cache.commit(batch, torch.tensor(committed))

    for tensor, other in zip(snapshot(cache), snapshot(stepped), strict=True):
        assert torch.equal(tensor, other)
    states, windows = snapshot(cache)
    for slot, (state, window) in zip(slots, expected, strict=True):
        assert torch.equal(states[:, slot], state)
        assert torch.equal(windows[:, slot], window)
    for slot in (1, 3, 5):
        assert torch.equal(states[:, slot], before[0][:, slot])
        assert torch.equal(windows[:, slot], before[1][:, slot])


def test_commit_does_not_depend_on_neighbours_or_order() -> None:
    dtypes = (torch.float32, torch.bfloat16)
    spans = {slot: Rows(slot, length, *dtypes) for slot, length in ((1, 4), (3, 7), (5, 2))}
    counts = {1: 3, 3: 6, 5: 1}
    outcomes = []
    for order in ([1, 3, 5], [5, 1, 3], [3]):
        cache = make_cache(*dtypes)
        seed_state(cache)
        batch = make_batch(order, [spans[slot].u.shape[1] for slot in order])
        write(cache, batch, [spans[slot] for slot in order])
        cache.commit(batch, torch.tensor([counts[slot] for slot in order]))
        outcomes.append((cache.state(2)[3].clone(), cache.conv_window(2)[3].clone()))
    for state, window in outcomes[1:]:
        assert torch.equal(state, outcomes[0][0])
        assert torch.equal(window, outcomes[0][1])


def test_stale_log_and_foreign_slots_may_hold_nan() -> None:
    dtypes = (torch.float32, torch.bfloat16)
    cache = make_cache(*dtypes)
    cache.poison(range(SLOTS))
    cache.reset([2])
    rows = Rows(1, 3, *dtypes)
    batch = make_batch([2], [3])
    write(cache, batch, [rows])
    cache.commit(batch, torch.tensor([2]))
    states, windows = snapshot(cache)
    assert states[:, 2].isfinite().all()
    assert windows[:, 2].isfinite().all()
    assert torch.equal(windows[:, 2, 0], torch.zeros(LAYERS, CHANNELS, dtype=torch.bfloat16))
    assert states[:, 1].isnan().all()


def test_a_group_without_spans_commits_nothing() -> None:
    cache = make_cache(torch.float32, torch.float32)
    seed_state(cache)
    before = snapshot(cache)
    cache.commit(make_batch([], []), torch.empty(0, dtype=torch.int64))
    for tensor, other in zip(snapshot(cache), before, strict=True):
        assert torch.equal(tensor, other)


def test_rows_beyond_the_log_are_refused() -> None:
    cache = make_cache(torch.float32, torch.float32, max_step_rows=4)
    with pytest.raises(AssertionError, match="5 step rows exceed the log of 4 rows"):
        write(cache, make_batch([0], [5]), [Rows(0, 5, torch.float32, torch.float32)])


def test_the_highest_slot_of_a_large_cache_is_a_slot_like_any_other() -> None:
    dtypes = (torch.float32, torch.float32)
    cache = RecurrentCache(
        num_layers=LAYERS,
        num_slots=140,
        max_step_rows=4,
        state_shape=(HEADS, VALUE, KEY),
        conv_shape=(WINDOW, CHANNELS),
        state_dtype=dtypes[0],
        conv_dtype=dtypes[1],
        device=torch.device("cpu"),
    )
    rows = Rows(3, 2, *dtypes)
    for slot in (0, 139):
        batch = make_batch([slot], [2])
        write(cache, batch, [rows])
        cache.commit(batch, torch.tensor([2]))
    assert torch.equal(cache.state(1)[0], cache.state(1)[139])
    assert cache.state(1)[139].abs().sum() > 0


def layouts() -> tuple[PagedLayout, RecurrentLayout]:
    return (
        PagedLayout(name="latents", num_layers=2, row_shape=(6,), dtype=torch.bfloat16),
        RecurrentLayout(
            name="recurrent",
            num_layers=LAYERS,
            state_shape=(HEADS, VALUE, KEY),
            state_dtype=torch.float32,
            conv_shape=(WINDOW, CHANNELS),
            conv_dtype=torch.bfloat16,
        ),
    )


def test_bytes_follow_from_the_layouts() -> None:
    paged, recurrent = layouts()
    budget = CacheBudget(num_pages=5, page_size=4, num_slots=3, max_step_rows=8)
    caches = CacheSet.build((recurrent, paged), budget, torch.device("cpu"))
    assert caches.latents.num_bytes == 5 * paged.bytes_per_page(4)
    assert caches.recurrent.num_bytes == 3 * recurrent.bytes_per_slot + 8 * recurrent.log_bytes_per_row
    assert caches.num_bytes == caches.latents.num_bytes + caches.recurrent.num_bytes


def test_a_model_with_other_layouts_is_refused() -> None:
    paged, recurrent = layouts()
    budget = CacheBudget(num_pages=5, page_size=4, num_slots=3, max_step_rows=8)
    with pytest.raises(ConfigError, match="2 paged and 1 recurrent"):
        CacheSet.build((paged, paged, recurrent), budget, torch.device("cpu"))


def test_a_snapshot_moves_one_sequence_and_nothing_else() -> None:
    budget = CacheBudget(num_pages=5, page_size=4, num_slots=3, max_step_rows=8)
    caches = CacheSet.build(layouts(), budget, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    for layer in range(LAYERS):
        states = torch.randn((3, HEADS, VALUE, KEY), generator=generator)
        windows = torch.randn((3, WINDOW, CHANNELS), generator=generator).bfloat16()
        caches.recurrent.store(layer, torch.arange(3), states, windows)
    for layer in range(2):
        caches.latents.write(layer, torch.arange(20), torch.randn((20, 6), generator=generator).bfloat16())
    before = [caches.snapshot(slot, torch.arange(20)) for slot in range(3)]
    rows = torch.tensor([9, 3, 17])
    moved = caches.snapshot(1, rows)
    assert moved.num_bytes == 3 * layouts()[0].bytes_per_token + layouts()[1].bytes_per_slot
    caches.recurrent.poison([1])
    caches.latents.poison([0, 2, 4])  # a snapshot is a copy, not a view
    caches.restore(2, torch.tensor([12, 5, 6]), moved)
    after = caches.snapshot(2, torch.tensor([12, 5, 6]))
    assert torch.equal(after.recurrent.state_LHVK, before[1].recurrent.state_LHVK)
    assert torch.equal(after.recurrent.window_LWD, before[1].recurrent.window_LWD)
    assert torch.equal(after.latents_LRC, before[1].latents_LRC[:, rows])
    others = [4, 7, 13, 14, 15]
    untouched = caches.snapshot(0, torch.tensor(others))
    assert torch.equal(untouched.recurrent.state_LHVK, before[0].recurrent.state_LHVK)
    assert torch.equal(untouched.latents_LRC, before[0].latents_LRC[:, others])
