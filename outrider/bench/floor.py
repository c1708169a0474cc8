"""The least time that a step can take on this machine: what it must read and compute, over measured speeds.

A floor assumes that the bytes of the checkpoint are read once, at the speed of the fastest streaming read of
a buffer of that size, or that the operations run at the fastest rate of any product, whichever is slower.
Both speeds are measured in the process and with the threads that the step has.

Dims: R rows, I inner, C columns.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from outrider.bench.streaming import reading_ways
from outrider.models.inspect import Inspection, describe
from outrider.ops.native.arena import Arena

__all__ = [
    "MachineSpeed",
    "ModelCost",
    "StepBytes",
    "StepShape",
    "device_barrier",
    "model_cost",
    "step_bytes",
    "step_floor_s",
    "step_operations",
]

ROUTED, EMBEDDING = "routed experts", "embedding"
HUGE_PAGES = ", huge pages"  # added to a way of reading; where the system has none, another reading of small ones
BUCKET = 1.25  # sizes within this ratio share one measured buffer
READ_COLUMNS = 1024
READ_SECONDS, PRODUCT_SECONDS = 0.05, 0.1  # a measurement repeats for at least so long
PRODUCTS_RIC = ((64, 1024, 4096), (256, 1024, 1024), (1024, 1024, 1024))  # rows, inner, columns
ACCELERATOR_SIDE = 8192


def device_barrier(device: torch.device) -> Callable[[], None]:
    """What to call so that the clock sees all work done so far."""
    return torch.cuda.synchronize if device.type == "cuda" else _nothing


def _nothing() -> None:
    """A CPU is never behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Sizes of a checkpoint that a step's cost follows from. Weight bytes are those of the files."""

    kind_bytes: Mapping[str, int]  # by weight kind of `outrider inspect`, without embedding and routed experts
    embedding_row_bytes: int
    expert_bytes: int  # one routed expert of one layer; 0 without experts
    num_moe_layers: int
    experts_per_token: int
    product_weights: int  # weights that each row is multiplied with, its routed experts included
    state_bytes: int  # KDA states and conv windows of a sequence
    latent_bytes: int  # MLA latents of a token
    state_elements: int  # KDA state elements of a sequence, all layers
    key_operations: int  # attention operations of one row and one key, all MLA layers, absorbed form


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step's floor depends on."""

    num_rows: int
    num_slots: int
    context: int  # committed tokens of each sequence
    num_experts: int  # distinct routed experts, summed over layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that a step must move."""

    weights: Mapping[str, int]  # by kind
    caches: Mapping[str, int]  # state is read and written, latents are read, new ones written

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        """Weights and caches."""
        return self.weight_bytes + sum(self.caches.values())


def model_cost(path: Path) -> ModelCost:
    """Read the sizes from a checkpoint's headers.

    Raises:
        CheckpointError, ConfigError: see ``describe``.
    """
    return _cost_of(describe(path))


def _cost_of(report: Inspection) -> ModelCost:
    config = report.config
    sizes = {kind.name: kind.num_bytes for kind in report.kinds}
    active = {kind.name: kind.num_active for kind in report.kinds}
    num_moe_layers = sum(config.moe_layers) if config.moe is not None else 0
    num_experts = config.moe.num_experts if config.moe is not None else 0
    mla, kda = config.mla, config.kda
    return ModelCost(
        kind_bytes={name: size for name, size in sizes.items() if name not in (ROUTED, EMBEDDING)},
        embedding_row_bytes=sizes[EMBEDDING] // config.vocab_size,
        expert_bytes=sizes.get(ROUTED, 0) // max(1, num_moe_layers * num_experts),
        num_moe_layers=num_moe_layers,
        experts_per_token=config.moe.experts_per_token if config.moe is not None else 0,
        product_weights=sum(active.values()),
        state_bytes=report.recurrent.bytes_per_slot,
        latent_bytes=report.latents.bytes_per_token,
        state_elements=len(config.kda_layers) * kda.num_heads * kda.head_dim**2,
        key_operations=2 * len(config.mla_layers) * mla.num_heads * (mla.latent_row_size + mla.kv_lora_rank),
    )


def step_bytes(cost: ModelCost, shape: StepShape) -> StepBytes:
    """Bytes of one step: every weight once, only the experts that were chosen, caches of its sequences."""
    weights = dict(cost.kind_bytes)
    weights[EMBEDDING] = shape.num_rows * cost.embedding_row_bytes
    if cost.num_moe_layers:
        weights[ROUTED] = shape.num_experts * cost.expert_bytes
    caches = {
        "KDA state": 2 * shape.num_slots * cost.state_bytes,
        "MLA latents": (shape.num_slots * shape.context + shape.num_rows) * cost.latent_bytes,
    }
    return StepBytes(weights=weights, caches=caches)


def step_operations(cost: ModelCost, shape: StepShape) -> int:
    """Floating-point operations of one step; a multiply-add counts two.

    Seven per state element and row: decay (1), product with the key (2), update (2), product with the query (2).
    Attention is counted as if every row saw the committed context only.
    """
    per_row = 2 * cost.product_weights + 7 * cost.state_elements + shape.context * cost.key_operations
    return shape.num_rows * per_row


def step_floor_s(num_bytes: int, operations: int, *, bytes_per_s: float, operations_per_s: float) -> float:
    """Seconds below which no step of these bytes and operations can be."""
    return max(num_bytes / bytes_per_s, operations / operations_per_s)


@dataclass(slots=True)
class MachineSpeed:
    """Fastest speeds seen so far on a device, by measuring; a later measurement can only raise them.

    Args:
        device: what is measured.
        clock: seconds.
    """

    device: torch.device
    clock: Callable[[], float] = time.perf_counter
    read_rates: dict[int, dict[str, float]] = field(default_factory=dict)  # buffer bytes -> way -> bytes/s
    product_rates: dict[str, float] = field(default_factory=dict)  # what was multiplied -> operations/s

    def measure_reads(self, sizes: Sequence[int]) -> None:
        """Measure the streaming read of a buffer of each size; sizes within a quarter share one."""
        for size in sizes:
            if self._bucket(size) is None:
                self.read_rates[size] = {}
        for size, rates in self.read_rates.items():
            for way, rate in self._read_rates_of(size).items():
                rates[way] = max(rates.get(way, 0.0), rate)

    def measure_products(self, dtype: torch.dtype) -> None:
        """Measure products in ``dtype`` and in float32."""
        shapes = PRODUCTS_RIC if self.device.type == "cpu" else ((ACCELERATOR_SIDE,) * 3,)
        for each in dict.fromkeys((dtype, torch.float32)):
            for shape in shapes:
                name = f"{str(each).removeprefix('torch.')} {'x'.join(map(str, shape))}"
                rate = self._product_rate(each, *shape)
                self.product_rates[name] = max(self.product_rates.get(name, 0.0), rate)

    def bytes_per_s(self, size: int) -> float:
        """The fastest streaming read of a buffer of about ``size`` bytes, which has been measured."""
        bucket = self._bucket(size)
        assert bucket is not None, f"no read of about {size} bytes was measured"
        return max(self.read_rates[bucket].values())

    @property
    def operations_per_s(self) -> float:
        """The fastest product."""
        return max(self.product_rates.values())

    def _bucket(self, size: int) -> int | None:
        near = [known for known in self.read_rates if max(known, size) <= BUCKET**0.5 * min(known, size)]
        return min(near, key=lambda known: abs(known - size)) if near else None

    def _read_rates_of(self, size: int) -> dict[str, float]:
        """Bytes a second of several ways to read every byte of a buffer once, in small and in huge pages."""
        shape = (max(1, size // (4 * READ_COLUMNS)), READ_COLUMNS)
        buffers = {"": torch.empty(shape, device=self.device)}
        if self.device.type == "cpu":
            buffers[HUGE_PAGES] = Arena().empty(shape, torch.float32)
        num_threads = torch.get_num_threads()
        rates = {}
        with ThreadPoolExecutor(num_threads) as pool:
            for where, buffer_RC in buffers.items():
                ways = reading_ways(buffer_RC.fill_(1.0), pool if num_threads > 1 else None)
                for name, way in ways.items():
                    rates[name + where] = buffer_RC.nbytes / self._fastest_s(way, READ_SECONDS)
        return rates

    def _product_rate(self, dtype: torch.dtype, rows: int, inner: int, columns: int) -> float:
        left_RI = torch.rand(rows, inner, device=self.device).to(dtype)
        right_IC = torch.rand(columns, inner, device=self.device).to(dtype).T
        out_RC = torch.empty(rows, columns, dtype=dtype, device=self.device)
        fastest_s = self._fastest_s(lambda: torch.mm(left_RI, right_IC, out=out_RC), PRODUCT_SECONDS)
        return 2 * rows * inner * columns / fastest_s

    def _fastest_s(self, work: Callable[[], object], at_least_s: float) -> float:
        """The shortest of at least three calls after two that are not counted."""
        barrier = device_barrier(self.device)
        for _ in range(2):
            work()
        barrier()
        shortest_s, begin_s, num_calls = float("inf"), self.clock(), 0
        while num_calls < 3 or self.clock() - begin_s < at_least_s:
            start_s = self.clock()
            work()
            barrier()
            shortest_s = min(shortest_s, self.clock() - start_s)
            num_calls += 1
        return shortest_s
