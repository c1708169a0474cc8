"""Steps made by hand are the engine's: right state in every slot, the same step however often it runs."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.bench.anatomy import DENSE, KDA, MLA, MODEL_PARTS, MOE, Stopwatch, anatomy_of, clocked, watched
from outrider.bench.routing import counted_experts
from outrider.bench.step_grid import StepPoint, step_grid
from outrider.bench.step_rig import StepRig
from outrider.engine.build import EngineLimits, resolve_config
from outrider.engine.prefill import last_logits
from outrider.models.kimi_k3 import kda
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.kimi_k3.moe import MoeFfn
from outrider.ops.moe import Routing, routed_experts
from outrider.ops.native.library import library
from outrider.plan import RoundTimings
from outrider.testing.recording import recording
from outrider.testing.toy import ToyOptions

GRID = step_grid([1, 3, 4, 9], [1, 2, 4], [16, 100], limit=256, model="toy")
CPU = torch.device("cpu")


class Seen:
    """Batches and outputs of every forward."""

    def __init__(self) -> None:
        self.batches: list[ForwardBatch] = []
        self.logits: list[torch.Tensor] = []

    def __call__(self, batch: ForwardBatch, output: TargetOutput) -> None:
        self.batches.append(batch)
        self.logits.append(output.logits_NV.clone())


def test_rows_tokens_and_positions_of_a_step(toy_target: KimiK3Model) -> None:
    seen = Seen()
    rig = StepRig(recording(toy_target, seen), GRID, CPU)
    for point in GRID.measured:
        step = rig.run(point)
        batch = seen.batches[-1]
        assert batch.step.lengths == point.spans and not batch.chunk.lengths
        assert set(batch.step.starts) == {point.context}
        assert len(set(batch.token_ids_T.tolist())) == point.rows
        assert step.result.num_rows == point.rows and step.seconds > 0
        assert batch.step.state_slots_S.unique().numel() == point.slots
        assert batch.slot_mapping_T.unique().numel() == point.rows


def test_every_row_of_every_slot_continues_the_prompt(toy_target: KimiK3Model) -> None:
    """The logits of a row are those of the prompt up to it, as a literal run of the whole prompt gives them."""
    seen = Seen()
    rig = StepRig(recording(toy_target, seen), GRID, CPU)
    prompt = [token for batch in seen.batches for token in batch.token_ids_T.tolist()]
    assert len(prompt) == 100
    config = resolve_config(
        EngineLimits(), max_num_seqs=1, max_model_len=256, num_draft_tokens=0, chunk_multiple=toy_target.chunk_multiple
    )
    point = StepPoint(rows=9, slots=4, context=16)
    rig.run(point)
    tokens, begin = seen.batches[-1].token_ids_T.tolist(), 0
    for span in point.spans:
        for row in range(begin, begin + span):
            expected = last_logits(toy_target, (*prompt[:16], *tokens[begin : row + 1]), config, CPU)
            # The last row of a prompt goes through the chunk form of the recurrence, so bits may differ.
            assert torch.allclose(seen.logits[-1][row].float(), expected.float(), atol=0.08, rtol=0.02)
            assert seen.logits[-1][row].argmax() == expected.argmax() or _near_tie(expected)
        begin += span


def _near_tie(logits_V: torch.Tensor) -> bool:
    first, second = logits_V.float().topk(2).values.tolist()
    return first - second < 0.1


def test_all_steps_of_a_point_are_the_same_one(toy_target: KimiK3Model) -> None:
    seen = Seen()
    rig = StepRig(recording(toy_target, seen), GRID, CPU)
    first = {}
    for turn in range(2):
        for point in GRID.measured if turn == 0 else GRID.measured[::-1]:
            rig.run(point)
            if turn == 0:
                first[point] = seen.logits[-1]
            else:
                assert torch.equal(seen.logits[-1], first[point]), point


def test_distinct_experts_are_those_that_the_step_used(wide_target: KimiK3Model) -> None:
    rig = StepRig(wide_target, GRID, CPU)
    used: list[int] = []

    def noting(x: torch.Tensor, routing: Routing, *others: Any) -> torch.Tensor:
        used.append(len(set(routing.expert_ids_TX.flatten().tolist())))
        return routed_experts(x, routing, *others)

    for module in wide_target.modules():
        if isinstance(module, MoeFfn):
            module.kernels = replace(module.kernels, experts=noting)
    for point in (StepPoint(rows=1, slots=1, context=16), StepPoint(rows=9, slots=2, context=100)):
        used.clear()
        with counted_experts(wide_target) as counts:
            rig.run(point)
        assert counts == used and len(used) == 3
    assert max(used) > ToyOptions().experts_per_token, "nine rows reach more experts than one"
    rig.run(point)
    assert len(counts) == 3, "nothing is counted once the body is left"


class Ticks:
    """A clock that moves by one second at every look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_watched_step_has_the_same_bits_and_leaves_the_model_as_it_was(toy_target: KimiK3Model) -> None:
    seen = Seen()
    rig = StepRig(recording(toy_target, seen), GRID, CPU)
    point = StepPoint(rows=4, slots=2, context=16)
    rig.run(point)
    before = {id(module): dict(vars(module)) for module in toy_target.modules()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in toy_target.modules()]
    functions = dict(vars(kda))
    watch = Stopwatch(Ticks(), lambda: None)
    with watched(toy_target, watch):
        rig.run(point)
    assert torch.equal(seen.logits[-1], seen.logits[-2])
    assert {id(module): dict(vars(module)) for module in toy_target.modules()} == before
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in toy_target.modules()] == hooks
    assert dict(vars(kda)) == functions
    calls = dict(watch.calls)
    config = toy_target.config
    assert calls["KDA attention", "other"] == len(config.kda_layers)
    assert calls["MLA attention", "other"] == len(config.mla_layers)
    assert (calls["MoE", "other"], calls["dense FFN", "other"], calls["layer", "other"]) == (3, 1, config.num_layers)
    attention = [layer.attention for layer in toy_target.layers]
    shapes = Counter(f"linear {module.in_proj.shape[0]}x{config.hidden_size}" for module in attention)
    found = {op: number for (part, op), number in calls.items() if part.endswith("attention") and op in shapes}
    assert found == dict(shapes)
    assert calls["model", f"linear {toy_target.vocab_size}x{config.hidden_size}"] == 1
    assert {part for part, _ in calls} == set(MODEL_PARTS)
    for part in (KDA, MLA, MOE, DENSE):
        assert any(name == part and not op.startswith(("linear", "other")) for name, op in calls), part


def test_a_step_from_a_recording_tells_its_own_times(toy_target: KimiK3Model) -> None:
    if library() is None:
        pytest.skip("steps are recorded with native operations only")
    seen = Seen()
    rig = StepRig(recording(toy_target, seen), GRID, CPU)
    point = StepPoint(rows=4, slots=2, context=16)
    for _ in range(3):
        rig.run(point)
    assert toy_target.steps.num_replayed == 1
    watch = Stopwatch(Ticks(), lambda: None)
    with clocked(toy_target, watch):
        step = rig.run(point)
    assert torch.equal(seen.logits[-1], seen.logits[-4])
    config, calls = toy_target.config, watch.calls
    assert {part for part, _ in calls} == set(MODEL_PARTS)
    assert (calls[KDA, "kda_rows"], calls[MLA, "mla_absorbed"]) == (len(config.kda_layers), len(config.mla_layers))
    assert (calls[MOE, "moe_routed"], calls["model", "gather_rows"]) == (3, 2)
    assert calls["residual mix", "mix_norm"] == 2 * config.num_layers + 1
    assert calls["model", f"linear {toy_target.vocab_size}x{config.hidden_size}"] == 1
    assert 0 < watch.seconds.total() < step.result.timings.forward_s
    with clocked(toy_target, watch), toy_target.steps.paused():
        watch.clear()
        rig.run(point)
    assert not watch.calls


def test_own_times_add_up() -> None:
    watch = Stopwatch(Ticks(), lambda: None)
    # Looks at the clock: forward 1, layer 2, product 3 and 4, layer ends 5, forward ends 6.
    inner = watch.around(lambda: None, "product")

    def middle() -> None:
        watch.enter("layer", "other")
        inner()
        watch.leave()

    watch.around(middle, "other")()
    assert dict(watch.seconds) == {("layer", "product"): 1.0, ("layer", "other"): 2.0, ("model", "other"): 2.0}
    timings = RoundTimings(propose_s=9.0, batch_s=1.0, forward_s=5.5, accept_s=2.0, commit_s=3.0, observe_s=0.25)
    anatomy = anatomy_of(watch, timings, watched_s=12.0, step_ms=10_000.0)
    assert sum(part.ms for part in anatomy.parts) == 12_000.0
    assert sum(part.ms for part in anatomy.parts) + anatomy.watching_ms == anatomy.step_ms
    assert anatomy.part_ms("layer") == 3000.0
    # 12 s less the verbs' 11.75 is the round's own; half a second of the forward was in no frame.
    assert anatomy.part_ms("round") == 250.0
    assert anatomy.part_ms("model") == 2500.0
