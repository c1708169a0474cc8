"""Toy checkpoints and reference runs shared by the K3 tests; written once per session."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.registry import load_target
from outrider.testing.reference_k3 import ReferenceOutput, reference_forward
from outrider.testing.toy import ToyOptions, deep_toy, kimi_linear_toy, toy_config, toy_tensors, write_toy_checkpoint

SHORT = ToyOptions(num_layers=5, mla_layers=(1, 3, 4), attn_res_block_size=2)

VARIANTS = {
    "k3": ToyOptions(),
    "deep": deep_toy(),
    "kimi_linear": kimi_linear_toy(),
    "softplus, low-rank gate, unbounded situ": dataclasses.replace(
        SHORT, gate_lower_bound=None, full_rank_gate=False, latent_norm=False
    ),
    "wide gate bound": dataclasses.replace(SHORT, gate_lower_bound=-8.0),
    "plain residual, no latent, no shared expert": dataclasses.replace(
        SHORT, attn_res_block_size=None, latent_size=None, latent_norm=False, num_shared_experts=0, activation="silu"
    ),
    "plain q, no MLA gate, other eps": dataclasses.replace(
        SHORT, q_lora_rank=None, mla_output_gate=False, mla_lora_norm_eps=1e-3
    ),
    "more heads than head_dim, unquantised, top 3 of 5": dataclasses.replace(
        SHORT,
        kda_heads=10,
        kda_head_dim=8,
        num_experts=5,
        experts_per_token=3,
        moe_intermediate_size=20,
        latent_size=28,
        quantized=False,
        routed_scaling_factor=2.5,
    ),
}
SEED = 5


@dataclasses.dataclass(frozen=True)
class Toy:
    """One variant: options, directory, and its reference over two token sequences."""

    options: ToyOptions
    directory: Path
    sequences: tuple[tuple[int, ...], ...]

    def load(self, dtype: torch.dtype = torch.float64, experts: str = "unpacked") -> KimiK3Model:
        return load_target(self.directory, dtype=dtype, experts=experts)

    def reference(self, sequence: int) -> ReferenceOutput:
        return _reference(self.options, self.sequences[sequence])


_REFERENCES: dict[tuple[ToyOptions, tuple[int, ...]], ReferenceOutput] = {}


def _reference(options: ToyOptions, token_ids: tuple[int, ...]) -> ReferenceOutput:
    key = (options, token_ids)
    if key not in _REFERENCES:
        _REFERENCES[key] = reference_forward(toy_tensors(options, SEED), toy_config(options), token_ids)
    return _REFERENCES[key]


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Callable[[str], Toy]:
    made: dict[str, Toy] = {}

    def make(name: str) -> Toy:
        if name not in made:
            options = VARIANTS[name]
            directory = write_toy_checkpoint(tmp_path_factory.mktemp("toy"), options, SEED)
            generator = torch.Generator().manual_seed(11)
            sequences = tuple(
                tuple(torch.randint(0, options.vocab_size, (n,), generator=generator).tolist()) for n in (23, 9)
            )
            made[name] = Toy(options=options, directory=directory, sequences=sequences)
        return made[name]

    return make
