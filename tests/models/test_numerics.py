"""What the probe's outcome does to a loaded model, and how it is kept between starts."""

import json
import logging

import pytest
import torch
import torch.nn.functional as F

from outrider.config import user_cache_directory
from outrider.errors import ConfigError
from outrider.models import numerics, probe_cache
from outrider.models.kernels import EXACT_KERNELS, PLAIN_KERNELS
from outrider.models.numerics import NumericsChoice, chosen_linear, linear_checks, resolve_numerics
from outrider.models.registry import load_target
from outrider.ops import linear as linear_ops
from outrider.ops.native.library import library_for
from outrider.ops.native.linear import PackedLinear, pack_weights
from outrider.ops.probe import OpCheck, ProbeOutcome, run_checks
from outrider.testing.driver import Driver, Span
from outrider.testing.toy import ToyOptions, write_toy_checkpoint

CPU = torch.device("cpu")
TOY = ToyOptions(num_layers=3, mla_layers=(1,), attn_res_block_size=2)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Planted:
    """A check of two geometries that counts how often it is run."""

    def __init__(self, *bad: str) -> None:
        self.bad, self.num_runs = bad, 0
        self.check = OpCheck(name="op", geometries=("cheap", "dear"), find_violation=self._find)

    def _find(self, geometry: str) -> str | None:
        self.num_runs += 1
        return f"{geometry} differs" if geometry in self.bad else None


def resolve(planted: Planted, probe: str = "auto", mode: str = "exact"):
    choice = NumericsChoice(mode=mode, probe=probe)
    return resolve_numerics([planted.check], choice, dtype=torch.float32, device=CPU)


def kept_files():
    return sorted((user_cache_directory() / "numerics").glob("*"))


def test_an_outcome_is_kept_and_recalled() -> None:
    planted = Planted("cheap")
    first, second = resolve(planted), resolve(planted)
    assert (first.source, second.source) == ("probed", "cached")
    assert planted.num_runs == 2  # both geometries, once
    assert dict(first.geometries) == dict(second.geometries) == dict(second.replaced) == {"op": "dear"}
    assert first.promises_identity and second.promises_identity
    (file,) = kept_files()
    assert file.suffix == ".json"


def test_force_probes_again_and_replaces_what_was_kept() -> None:
    resolve(Planted())
    assert resolve(Planted("cheap"), "force").geometries == {"op": "dear"}
    assert resolve(Planted(), "auto").geometries == {"op": "dear"}


def test_skip_never_probes_and_keeps_nothing() -> None:
    planted = Planted("cheap", "dear")
    report = resolve(planted, "skip")
    assert (planted.num_runs, report.source, report.geometries) == (0, "skipped", {"op": "cheap"})
    assert "not probed" in report.summary()
    assert not kept_files()


def test_a_loss_is_logged_reported_and_still_known_at_the_next_start(caplog) -> None:
    for source in ("probed", "cached"):
        caplog.clear()
        report = resolve(Planted("cheap", "dear"))
        assert (report.source, dict(report.lost)) == (source, {"op": "cheap differs"})
        assert not report.promises_identity
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "NOT KEPT" in record.getMessage() and "op: cheap differs" in record.getMessage()


def test_fast_promises_nothing_and_probes_nothing() -> None:
    planted = Planted()
    report = resolve(planted, mode="fast")
    assert (planted.num_runs, report.source, report.promises_identity) == (0, "none", False)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"format": 0, "geometries": {"op": "dear"}, "lost": {}}',
        b'{"format": 1, "geometries": {"op": "unknown"}, "lost": {}}',
        b'{"format": 1, "geometries": {"op": ["dear"]}, "lost": {}}',
        b'{"format": 1, "geometries": {}, "lost": {}}',
        b'{"format": 1, "geometries": {"op": "dear"}, "lost": {"other": "x"}}',
        b'{"format": 1, "geometries": {"op": "dear"}, "lost": {"op": 3}}',
        b'{"format": 1, "geometries": {"op": "dear"}}',
    ],
)
def test_a_damaged_file_is_as_good_as_none(content: bytes) -> None:
    resolve(Planted())
    (file,) = kept_files()
    file.write_bytes(content)
    planted = Planted()
    report = resolve(planted)
    assert (report.source, report.geometries, planted.num_runs) == ("probed", {"op": "cheap"}, 1)
    assert json.loads(file.read_text())["geometries"] == {"op": "cheap"}


def test_a_place_that_cannot_be_written_costs_a_probe_only(tmp_path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    planted = Planted()
    assert [resolve(planted).source, resolve(planted).source] == ["probed", "probed"]


def test_the_file_is_of_this_machine_build_threads_dtype_and_checks(monkeypatch) -> None:
    check, dtype = Planted().check, torch.float32
    names = {probe_cache.probe_file([check], dtype, CPU)}
    names.add(probe_cache.probe_file([check], torch.bfloat16, CPU))
    other = OpCheck(name="op", geometries=("cheap",), find_violation=check.find_violation)
    names.add(probe_cache.probe_file([other], dtype, CPU))
    for name in ("processor", "torch", "build", "capability", "matmul_precision", "num_threads", "environment", "ops"):
        identity = probe_cache.machine_identity(CPU) | {name: "another"}
        with monkeypatch.context() as patch:
            patch.setattr(probe_cache, "machine_identity", lambda device, identity=identity: identity)
            names.add(probe_cache.probe_file([check], dtype, CPU))
    assert len(names) == 11
    assert probe_cache.probe_file([check], dtype, CPU) in names


def test_variables_that_choose_kernels_are_part_of_it(monkeypatch) -> None:
    before = probe_cache.probe_file([], torch.float32, CPU)
    monkeypatch.setenv("UNRELATED", "1")
    assert probe_cache.probe_file([], torch.float32, CPU) == before
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert probe_cache.probe_file([], torch.float32, CPU) != before


def test_a_relative_cache_home_is_ignored(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache_directory() == tmp_path / ".cache" / "outrider"


def test_words_are_checked() -> None:
    with pytest.raises(ConfigError, match="numerics='quick'"):
        NumericsChoice(mode="quick")
    with pytest.raises(ConfigError, match="probe='never'"):
        NumericsChoice(probe="never")


def test_default_geometries_are_the_default_function(torch_forms, dtype=torch.bfloat16) -> None:
    shapes = [(5000, 8), (6000, 8), (24, 8)]
    checks = linear_checks("linear", shapes, dtype, CPU)
    assert [check.name for check in checks] == ["linear 24x8", "linear 4096x8"]
    geometries = {check.name: check.geometries[0] for check in checks}
    assert chosen_linear("linear", shapes, dtype, CPU, geometries) is linear_ops.linear


def test_the_native_form_takes_the_weights_for_which_it_holds() -> None:
    native = library_for(torch.bfloat16, CPU)
    if native is None:
        pytest.skip("no native operations on this machine")
    shapes = [(64, 8), (24, 8)]
    checks = linear_checks("linear", shapes, torch.bfloat16, CPU)
    assert {check.geometries[0] for check in checks} == {native.geometry}
    assert run_checks(checks).geometries == {check.name: native.geometry for check in checks}
    geometries = {"linear 64x8": native.geometry, "linear 24x8": "up to 32 rows a call"}
    product = chosen_linear("linear", shapes, torch.bfloat16, CPU, geometries)
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    pack_weights(product, weights)
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(product(x, weights[1]), linear_ops.linear(x, weights[1]))
    assert isinstance(product, PackedLinear) and len(product._packed) == 1
    assert all(len(check.geometries) == 4 for check in linear_checks("router", shapes, torch.float32, CPU))


def test_weights_are_packed_in_the_order_of_use(tmp_path) -> None:
    if library_for(torch.bfloat16, CPU) is None:
        pytest.skip("no native operations on this machine")
    model = load_target(write_toy_checkpoint(tmp_path / "toy", TOY), dtype=torch.bfloat16)
    packed = model.linear._packed
    pointers = {name: packed[id(weight)].pointer for name, weight in model.named_parameters() if id(weight) in packed}
    names = sorted(pointers, key=pointers.__getitem__)
    assert names[-1] == "lm_head" and names[0] == "layers.0.attention.in_proj"
    layers = [int(name.split(".")[1]) for name in names[:-1]]
    assert layers == sorted(layers) and set(layers) == set(range(model.num_layers))
    assert not any("embedding" in name or "kv_b_proj" in name for name in names)
    assert any("kv_b_proj" in name for name, _ in model.named_parameters())


def test_a_replaced_geometry_reaches_every_weight_it_stands_for() -> None:
    shapes = [(5000, 8), (6000, 8), (24, 8)]
    geometries = {"linear 24x8": "up to 32 rows a call", "linear 4096x8": "exactly 1 rows a call"}
    table = chosen_linear("linear", shapes, torch.bfloat16, CPU, geometries)
    assert isinstance(table, linear_ops.LinearTable)
    single = linear_ops.RowTiles(num_rows=1, padded=True)
    assert table.tiles == {(5000, 8): single, (6000, 8): single}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loaded_model_reports_its_probe(tmp_path, dtype) -> None:
    directory = write_toy_checkpoint(tmp_path / "toy", TOY)
    model = load_target(directory, dtype=dtype)
    assert model.numerics.promises_identity, model.numerics.summary()
    names = " ".join(model.numerics.geometries)
    for part in ("linear 97x64", "router 8x64", "experts of 32 to 32", "norm of 64", "residual mix",
                 "KDA step", "KDA prompt", "convolution", "gated norm", "decode attention", "prompt attention",
                 "situ"):  # fmt: skip
        assert part in names
    assert load_target(directory, dtype=dtype).numerics.source == "cached"
    fast = load_target(directory, dtype=dtype, numerics=NumericsChoice(mode="fast"))
    assert fast.linear is PLAIN_KERNELS.linear and not fast.numerics.promises_identity


@pytest.mark.parametrize("experts", ["unpacked", "packed"])
def test_fast_is_the_same_mathematics(tmp_path, experts) -> None:
    """Prompt, single steps and ragged verify spans, in float64, up to its rounding."""
    directory = write_toy_checkpoint(tmp_path / "toy", TOY)
    outputs = []
    for mode in ("exact", "fast"):
        choice = NumericsChoice(mode=mode, probe="skip")
        driver = Driver(model=load_target(directory, dtype=torch.float64, experts=experts, numerics=choice))
        first = driver.forward([Span(slot=0, token_ids=tuple(range(19)), is_prompt=True)])
        driver.forward([Span(slot=2, token_ids=(5, 4, 3), is_prompt=True)])
        spans = [Span(slot=0, token_ids=(7, 8), is_prompt=False), Span(slot=2, token_ids=(1,) * 20, is_prompt=False)]
        outputs.append(torch.cat([first.logits_NV, driver.forward(spans).logits_NV]))
    exact, fast = outputs
    assert not torch.equal(exact, fast), "fast runs the exact kernels"
    assert (exact - fast).abs().max() <= 1e-11 * exact.abs().max()


def test_a_model_on_a_library_with_row_dependent_kernels_keeps_its_bits(tmp_path, monkeypatch, torch_forms) -> None:
    """The library gives other bits below 16 rows: the model must take padded tiles and stay row-invariant."""
    real = F.linear
    monkeypatch.setattr(linear_ops.F, "linear", lambda x, w: real(x, w) * (1.125 if x.shape[0] < 16 else 1))
    directory = write_toy_checkpoint(tmp_path / "toy", TOY)
    model = load_target(directory, dtype=torch.bfloat16)
    assert model.numerics.promises_identity
    assert model.numerics.replaced["linear 97x64"] == "exactly 16 rows a call"
    assert model.numerics.replaced["experts of 32 to 32"] == "exactly 16 rows a call"
    assert step_in_company(model, ()) == step_in_company(model, (3, 1, 4, 1, 5))
    plain = load_target(directory, dtype=torch.bfloat16, numerics=NumericsChoice(probe="skip"))
    assert plain.layers[2].ffn.kernels.experts is EXACT_KERNELS.experts
    few = tuple(range(5)) * 4
    assert step_in_company(plain, ()) != step_in_company(plain, few), "the planted library changes nothing"


def step_in_company(model, others: tuple[int, ...]) -> list[float]:
    """Logits of one decode step, alone or with another sequence that verifies some rows."""
    driver = Driver(model=model)
    driver.forward([Span(slot=0, token_ids=tuple(range(16)), is_prompt=True)])
    spans = [Span(slot=0, token_ids=(7,), is_prompt=False)]
    if others:
        driver.forward([Span(slot=1, token_ids=tuple(range(16)), is_prompt=True)])
        spans.append(Span(slot=1, token_ids=others, is_prompt=False))
    return driver.forward(spans).logits_NV[0].tolist()


def test_the_outcome_of_other_checks_is_not_taken() -> None:
    outcome = ProbeOutcome(geometries={"op": "dear"}, lost={})
    file = user_cache_directory() / "numerics" / "x.json"
    probe_cache.remember(file, outcome)
    assert probe_cache.recall(file, [Planted().check]) == outcome
    other = OpCheck(name="other", geometries=("dear",), find_violation=lambda _: None)
    assert probe_cache.recall(file, [other]) is None
    assert numerics.UNPROBED.promises_identity  # a model built without a loader rests on the defaults
