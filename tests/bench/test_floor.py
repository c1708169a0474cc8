"""Bytes and operations of a step counted another way, and speeds with a clock that the test moves."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outrider.bench.floor import (
    MachineSpeed,
    StepShape,
    model_cost,
    step_bytes,
    step_floor_s,
    step_operations,
)
from outrider.bench.streaming import ABSENT_BYTE, reading_ways
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.weights import CheckpointReader
from outrider.testing.toy import ToyOptions

MOE_LAYERS = 3  # of four; the first is dense


class Clock:
    """Seconds that pass with every look at it."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_a_step_that_reaches_every_expert_reads_every_byte_of_the_files(toy_pair: tuple[Path, Path]) -> None:
    options = ToyOptions()
    shape = StepShape(num_rows=options.vocab_size, num_slots=1, context=0, num_experts=MOE_LAYERS * options.num_experts)
    moved = step_bytes(model_cost(toy_pair[0]), shape)
    with CheckpointReader(toy_pair[0]) as reader:
        assert moved.weight_bytes == reader.num_bytes()


def test_an_expert_and_a_row_cost_what_they_hold(toy_pair: tuple[Path, Path]) -> None:
    options, cost = ToyOptions(), model_cost(toy_pair[0])
    less = step_bytes(cost, StepShape(num_rows=1, num_slots=1, context=10, num_experts=6))
    more = step_bytes(cost, StepShape(num_rows=2, num_slots=2, context=10, num_experts=7))
    with CheckpointReader(toy_pair[0]) as reader:
        prefix = "language_model.model.layers.1.block_sparse_moe.experts.0."
        expert = sum(reader.entry(name).num_bytes for name in reader.names() if name.startswith(prefix))
    assert more.weight_bytes - less.weight_bytes == expert + 2 * options.hidden_size
    # Two MLA layers, bfloat16: ten old tokens read and one written for each sequence.
    latent_row = 2 * 2 * (options.kv_lora_rank + options.rope_head_dim)
    assert (less.caches["MLA latents"], more.caches["MLA latents"]) == (11 * latent_row, 22 * latent_row)
    # Two KDA layers, float32 states and a bfloat16 window of three inputs, read and written.
    inner = options.kda_heads * options.kda_head_dim
    assert less.caches["KDA state"] == 2 * 2 * (4 * inner * options.kda_head_dim + 2 * 3 * 3 * inner)


def test_operations_are_those_of_the_matrices(toy_pair: tuple[Path, Path], wide_target: KimiK3Model) -> None:
    cost, options = model_cost(toy_pair[0]), ToyOptions()
    matrices = 0
    for name, parameter in wide_target.named_parameters():
        if name == "embedding":
            continue
        share = options.experts_per_token / options.num_experts if ".experts." in name else 1
        matrices += int(parameter.numel() * share)
    # A fused score vector is two tensors on disk; the convolution and the norms are small and in both counts.
    assert cost.product_weights == pytest.approx(matrices, rel=0.02)
    one = step_operations(cost, StepShape(num_rows=1, num_slots=1, context=0, num_experts=0))
    three = step_operations(cost, StepShape(num_rows=3, num_slots=1, context=0, num_experts=0))
    assert three == 3 * one > 2 * matrices
    keys = step_operations(cost, StepShape(num_rows=1, num_slots=1, context=5, num_experts=0)) - one
    assert keys == 5 * 2 * 2 * options.mla_heads * (2 * options.kv_lora_rank + options.rope_head_dim)


def test_the_slower_of_reading_and_computing_is_the_floor() -> None:
    assert step_floor_s(100, 1000, bytes_per_s=10.0, operations_per_s=1000.0) == 10.0
    assert step_floor_s(100, 1000, bytes_per_s=1000.0, operations_per_s=10.0) == 100.0


def test_rates_are_sizes_over_the_shortest_time_and_only_rise() -> None:
    clock = Clock(0.5)
    speed = MachineSpeed(torch.device("cpu"), clock)
    speed.measure_reads([40960, 44000, 409600])
    assert {size: set(rates.values()) for size, rates in speed.read_rates.items()} == {
        40960: {40960 / 0.5}, 409600: {409600 / 0.5},
    }  # fmt: skip
    assert {"byte search", "sum", "sum, huge pages"} <= speed.read_rates[40960].keys()
    assert speed.bytes_per_s(44000) == speed.bytes_per_s(40960) == 40960 / 0.5
    clock.step_s = 0.25
    speed.measure_reads([])
    assert speed.bytes_per_s(40960) == 40960 / 0.25
    clock.step_s = 0.5
    speed.measure_reads([])
    assert speed.bytes_per_s(40960) == 40960 / 0.25


def test_the_fastest_way_of_reading_counts() -> None:
    speed = MachineSpeed(torch.device("cpu"), read_rates={1000: {"sum": 3.0, "byte search": 7.0, "maximum": 5.0}})
    assert speed.bytes_per_s(1001) == 7.0


def test_the_byte_search_reads_to_the_end_of_the_buffer() -> None:
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        try:
            with ThreadPoolExecutor(num_threads) as pool:
                buffer_RC = torch.ones(3, 1024)
                search = reading_ways(buffer_RC, pool if num_threads > 1 else None)["byte search"]
                assert not _found(search())
                buffer_RC.view(torch.uint8)[-1, -1] = ABSENT_BYTE
                assert _found(search())
        finally:
            torch.set_num_threads(1)


def _found(outcome: object) -> bool:
    """Whether a search, of one thread or of several, met the byte."""
    return any(outcome) if isinstance(outcome, list) else outcome is not None


def test_the_fastest_product_counts() -> None:
    speed = MachineSpeed(torch.device("cpu"), Clock(0.5))
    speed.measure_products(torch.bfloat16)
    assert {name.split()[0] for name in speed.product_rates} == {"bfloat16", "float32"}
    assert speed.operations_per_s == 2 * 1024**3 / 0.5


def test_two_threads_read_the_whole_buffer() -> None:
    torch.set_num_threads(2)
    try:
        speed = MachineSpeed(torch.device("cpu"), Clock(0.5))
        speed.measure_reads([40960])
        assert speed.bytes_per_s(40960) == 40960 / 0.5
    finally:
        torch.set_num_threads(1)
