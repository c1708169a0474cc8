"""Building and loading the native libraries; what happens without a compiler, and with a damaged cache."""

import logging
import os

import pytest
import torch

from outrider.errors import ConfigError
from outrider.ops.native import build as native_build
from outrider.ops.native import library as loader


@pytest.fixture
def unloaded(monkeypatch):
    """No library asked for yet in this process; forgotten again afterwards."""
    monkeypatch.delenv("OUTRIDER_NATIVE", raising=False)
    loader.library.cache_clear()
    yield
    loader.library.cache_clear()


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """An empty place for libraries instead of the one in the checkout."""
    directories = (tmp_path / "package" / "key", tmp_path / "user" / "key")
    monkeypatch.setattr(native_build, "library_directories", lambda: directories)
    monkeypatch.setattr(loader, "library_directories", lambda: directories)
    return directories


@pytest.fixture
def small(monkeypatch, tmp_path):
    """One source and one variant for plain x86-64, so that a build costs little."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "answer.cpp").write_text(
        '#include <cstdint>\nextern "C" __attribute__((visibility("default"))) int64_t outrider_answer() { return 42; }'
    )
    monkeypatch.setattr(native_build, "SOURCES", sources)
    for module in (native_build, loader):
        monkeypatch.setattr(module, "VARIANTS", {"plain": ()})
    monkeypatch.setattr(loader, "NEEDED", {"plain": frozenset()})
    try:
        native_build.find_compiler()
    except native_build.NativeBuildError as error:
        pytest.skip(str(error))
    return sources


def answer(library):
    return library.function("answer", [], loader.INT)()


def test_missing_library_is_built_and_loaded(unloaded, elsewhere, small):
    library = loader.library()
    assert library.variant == "plain" and answer(library) == 42
    assert library.path.parent == elsewhere[0]
    assert sorted(path.name for path in elsewhere[0].iterdir()) == ["build.json", "plain.so"]


def test_second_build_does_nothing(elsewhere, small):
    made = native_build.build()
    before = (made / "plain.so").stat().st_mtime_ns
    assert native_build.build() == made and (made / "plain.so").stat().st_mtime_ns == before
    native_build.build(force=True)
    assert (made / "plain.so").stat().st_mtime_ns != before


@pytest.mark.parametrize("damage", ["truncated", "altered", "manifest", "missing"])
def test_damaged_library_is_built_again(unloaded, elsewhere, small, damage):
    made = native_build.build()
    file = made / ("build.json" if damage == "manifest" else "plain.so")
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        altered = content[: len(content) // 2] if damage != "altered" else content[:-1] + bytes([content[-1] ^ 1])
        file.write_bytes(altered)
    assert not native_build.intact(made)
    assert answer(loader.library()) == 42
    assert native_build.intact(made)


def test_changed_source_gets_another_key(small):
    native_build.source_key.cache_clear()
    first = native_build.source_key()
    (small / "answer.cpp").write_text("// other")
    native_build.source_key.cache_clear()
    assert native_build.source_key() != first
    native_build.source_key.cache_clear()


def test_older_libraries_are_dropped(elsewhere, small):
    older = elsewhere[0].parent / ("0" * 16)
    kept = elsewhere[0].parent / "other"
    older.mkdir(parents=True)
    kept.mkdir()
    native_build.build()
    assert not older.exists() and kept.exists()


def test_read_only_package_goes_to_the_user_cache(unloaded, elsewhere, small):
    elsewhere[0].parent.parent.mkdir(parents=True, exist_ok=True)
    elsewhere[0].parent.write_text("a file where the folder should be")  # fails for root too
    library = loader.library()
    assert library.path.parent == elsewhere[1] and answer(library) == 42


def test_no_compiler_means_torch_forms_and_one_line(unloaded, elsewhere, small, monkeypatch, caplog):
    monkeypatch.setenv("PATH", os.devnull)
    with caplog.at_level(logging.INFO, logger=loader.__name__):
        assert loader.library() is None
        assert loader.library() is None
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "torch forms" in warnings[0].message and "no C++ compiler found" in warnings[0].message


def test_compiler_that_fails_is_reported(unloaded, elsewhere, small, caplog):
    (small / "answer.cpp").write_text("this is no C++")
    assert loader.library() is None
    assert "failed" in caplog.text


def test_library_that_does_not_load_is_reported(unloaded, elsewhere, small, monkeypatch, caplog):
    def refuse(path):
        raise OSError("wrong ELF class")

    monkeypatch.setattr(loader.ctypes, "CDLL", refuse)
    assert loader.library() is None
    assert "wrong ELF class" in caplog.text


def test_processor_without_avx2_gets_torch_forms(unloaded, monkeypatch, caplog):
    monkeypatch.setattr(loader, "_processor_flags", lambda: frozenset({"sse2"}))
    assert loader.library() is None
    assert "AVX2" in caplog.text


def test_variants_follow_the_flags(monkeypatch):
    flags = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    monkeypatch.setattr(loader, "_processor_flags", lambda: frozenset(flags))
    assert loader.runnable_variants() == ("avx2", "avx512")
    monkeypatch.setattr(loader, "_processor_flags", lambda: frozenset(flags | {"avx512_bf16"}))
    assert loader.runnable_variants() == ("avx2", "avx512", "avx512bf16")


def test_environment_turns_everything_off(unloaded, monkeypatch):
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    assert loader.library() is None
    loader.library.cache_clear()
    monkeypatch.setenv("OUTRIDER_NATIVE", "yes")
    with pytest.raises(ConfigError, match="OUTRIDER_NATIVE='yes'"):
        loader.library()


def test_only_bfloat16_on_a_cpu_is_native(native):
    assert loader.library_for(torch.float32, torch.device("cpu")) is None
    assert loader.library_for(torch.bfloat16, torch.device("meta")) is None
