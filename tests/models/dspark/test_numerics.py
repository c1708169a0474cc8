"""The start-up probe of a drafter: what it names, and that a form that looks at its company is told."""

import logging
from pathlib import Path

import pytest
import torch

from outrider.engine.llm import LLM
from outrider.models.dspark.config_json import parse_config
from outrider.models.dspark.numerics import block_checks
from outrider.ops import probe_block
from outrider.ops.probe import run_checks
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config, write_toy_drafter

CPU = torch.device("cpu")
BLOCK = "drafter block attention of 4 rows, 4 heads (2) of 8"


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    options = ToyDrafterOptions(hidden_size=64, num_target_layers=3, aux_layer_ids=(0, 1))
    write_toy_drafter(tmp_path / "drafter", options)
    toy = ToyOptions(num_layers=3, mla_layers=(1,), attn_res_block_size=2, num_experts=4, num_shards=1)
    return write_toy_checkpoint(tmp_path / "target", toy), tmp_path / "drafter"


def test_the_report_of_a_pair_names_the_drafters_operations(paths: tuple[Path, Path]) -> None:
    pair, alone = (LLM(paths[0], drafter, dtype="float32", max_model_len=64) for drafter in (paths[1], None))
    names = set(pair.numerics.geometries) - set(alone.numerics.geometries)
    assert {BLOCK, "norm of 8", "silu of 48"} <= names
    assert "drafter linear 96x64" in names, "gate and up joined"
    assert pair.numerics.promises_identity, pair.numerics.summary()


def test_a_block_attention_that_depends_on_the_number_of_sequences_is_told(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = probe_block.block_attention

    def by_sequences(q_SGHK: torch.Tensor, *args: object, scale: float) -> torch.Tensor:
        out = real(q_SGHK, *args, scale=scale)  # type: ignore[arg-type]
        return out * (1 + 2.0**-6) if q_SGHK.shape[0] > 4 else out

    monkeypatch.setattr(probe_block, "block_attention", by_sequences)
    llm = LLM(*paths, dtype="float32", max_model_len=64, probe="force")
    assert list(llm.numerics.lost) == [BLOCK]
    assert "differs from the row alone" in llm.numerics.lost[BLOCK]
    assert not llm.numerics.promises_identity
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "NOT KEPT" in said and BLOCK in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            ToyDrafterOptions(layer_types=("full_attention", "sliding_attention"), sliding_window=20),
            ["block attention", "causal block attention of 4 rows, 4 heads (2) of 8, window 20"],
        ),
        (
            ToyDrafterOptions(
                family="speculators", layer_types=("sliding_attention",) * 2, sliding_window=20, markov_kind="rnn"
            ),
            ["causal block attention of 4 rows, 4 heads (2) of 8, window 20 from the anchor", "Markov gates of 16"],
        ),
        (ToyDrafterOptions(markov_kind="gated", tap_norm=True), ["block attention", "Markov gates of 16"]),
    ],
)
def test_every_kind_of_drafter_holds(options: ToyDrafterOptions, parts: list[str], dtype: torch.dtype) -> None:
    checks = block_checks(parse_config(toy_drafter_config(options)), dtype, CPU)
    names = [check.name for check in checks]
    assert all(any(name.startswith(f"drafter {part}") for name in names) for part in parts)
    assert not run_checks(checks).lost
