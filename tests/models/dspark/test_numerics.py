"""The start-up probe of a drafter: what it names, and that a form that looks at its company is told."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.engine.llm import LLM
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.config_json import parse_config
from outrider.models.dspark.kernels import TORCH_BLOCK_KERNELS, choose_block_kernels
from outrider.models.dspark.load import load_predictor
from outrider.models.dspark.numerics import BlockCheckNames, block_checks, check_names
from outrider.models.registry import load_target
from outrider.ops import block_attention
from outrider.ops.block_attention import BlockHeads, BlockMask
from outrider.ops.native.drafter import NativeDrafter
from outrider.ops.native.library import Library, library_for
from outrider.ops.native.markov import NativeMarkov
from outrider.ops.paged import PagedKeys, paged_keys
from outrider.ops.probe import FIXED, run_checks
from outrider.ops.rope import rotary_table
from outrider.ops.waiting import PLAIN_WAITING
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
    real = block_attention.block_attention

    def by_sequences(q_SGHK: torch.Tensor, *args: object, scale: float) -> torch.Tensor:
        out = real(q_SGHK, *args, scale=scale)  # type: ignore[arg-type]
        return out * (1 + 2.0**-6) if q_SGHK.shape[0] > 4 else out

    monkeypatch.setattr(block_attention, "block_attention", by_sequences)
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


SHIPPED = Path(__file__).parents[3] / "models"
CHAINED = ToyDrafterOptions(
    family="speculators",
    draft_vocab_size=41,
    layer_types=("full_attention", "sliding_attention"),
    sliding_window=20,
)


@pytest.fixture
def native() -> Library:
    library = library_for(torch.bfloat16, CPU)
    if library is None:
        pytest.skip("no native operations on this machine")
    return library


def test_the_shipped_drafter_reports_the_native_forms_that_it_runs(native: Library) -> None:
    target = load_target(SHIPPED / "k3-small", dtype=torch.bfloat16)
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    predictor = load_predictor(SHIPPED / "k3-small-dspark", target, tables, max_context=64)
    names = check_names(predictor.config)
    assert names.chain is not None
    found = {name: predictor.numerics.geometries[name] for name in every_name(names)}
    assert set(found.values()) == {native.geometry} and all(name.startswith("drafter ") for name in found)
    assert predictor.numerics.promises_identity, predictor.numerics.summary()


def every_name(names: BlockCheckNames) -> list[str]:
    return [*names.attention.values(), names.context_rows, *([] if names.chain is None else [names.chain])]


@pytest.mark.parametrize("part", ["drafts", "confidence", "logits"])
def test_a_native_chain_that_depends_on_its_slot_is_found(
    part: str, native: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences but the first are off; the torch chain is taken, and only it."""
    real = NativeMarkov.chain

    def off(self: NativeMarkov, *args: torch.Tensor, keep_logits: bool) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids_SG, confidence_SG = real(self, *args, keep_logits=keep_logits)  # type: ignore[arg-type]
        assert confidence_SG is not None
        {"drafts": token_ids_SG, "confidence": confidence_SG, "logits": args[-1]}[part][1:] += 1
        return token_ids_SG, confidence_SG

    monkeypatch.setattr(NativeMarkov, "chain", off)
    config = parse_config(toy_drafter_config(CHAINED))
    outcome = run_checks(block_checks(config, torch.bfloat16, CPU))
    names = check_names(config)
    assert not outcome.lost
    assert outcome.geometries == dict.fromkeys(every_name(names), native.geometry) | {names.chain: FIXED}
    kernels = choose_block_kernels(config, torch.bfloat16, CPU, outcome.geometries)
    assert kernels.markov is None
    assert kernels.attend.__func__ is NativeDrafter.attend_block  # type: ignore[attr-defined]
    assert kernels.store.__func__ is NativeDrafter.store_context_rows  # type: ignore[attr-defined]


def test_attention_falls_back_under_the_mask_that_fails(native: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    real = NativeDrafter.attend_block
    seen = []

    def off(self: NativeDrafter, qkv_TOK: torch.Tensor, heads: BlockHeads, *args: object) -> torch.Tensor:
        seen.append(heads.mask)
        out = real(self, qkv_TOK, heads, *args)  # type: ignore[arg-type]
        if heads.mask.causal:
            out[heads.num_rows :] *= 1 + 2.0**-6
        return out

    monkeypatch.setattr(NativeDrafter, "attend_block", off)
    config = parse_config(toy_drafter_config(CHAINED))
    outcome = run_checks(block_checks(config, torch.bfloat16, CPU))
    names = check_names(config)
    assert not outcome.lost
    expected = {mask: FIXED if mask.causal else native.geometry for mask in names.attention}
    assert len(set(expected.values())) == 2
    assert {mask: outcome.geometries[name] for mask, name in names.attention.items()} == expected
    kernels = choose_block_kernels(config, torch.bfloat16, CPU, outcome.geometries)
    for mask, geometry in expected.items():
        seen.clear()
        kernels.attend(*one_block(mask))
        assert seen == ([] if geometry == FIXED else [mask])


def one_block(mask: BlockMask) -> tuple[torch.Tensor, BlockHeads, torch.Tensor, torch.Tensor, PagedKeys]:
    """Arguments of attention of two rows after three keys."""
    heads = BlockHeads(
        num_heads=2,
        num_rows=2,
        gains_PK=torch.ones(3, 8, dtype=torch.bfloat16),
        eps=1e-6,
        table=rotary_table(8, 8, 1e4),
        mask=mask,
        scale=1.0,
    )
    context = torch.randn(3, 1, 8).bfloat16()
    keys = paged_keys(torch.arange(3)[None], torch.tensor([3]), page_size=1, max_context=3)
    return torch.randn(2, 4, 8).bfloat16(), heads, context, context, keys


def test_without_native_forms_that_hold_all_is_torch(native: Library) -> None:
    config = parse_config(toy_drafter_config(CHAINED))
    names = every_name(check_names(config))
    kernels = choose_block_kernels(config, torch.bfloat16, CPU, dict.fromkeys(names, FIXED))
    assert replace(kernels, waiting=PLAIN_WAITING) == TORCH_BLOCK_KERNELS  # copies need no check
