"""Compile the native operations: ``python -m outrider.ops.native.build``.

One shared library per instruction set, from the same sources, beside this file or, where that cannot be written, in
the user's cache. The directory is named after sources and flags, so a changed source never meets an old library.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from outrider.config import user_cache_directory

__all__ = ["VARIANTS", "NativeBuildError", "build", "find_compiler", "intact", "library_directories", "source_key"]

SOURCES = Path(__file__).parent / "src"
# Best last. What a processor must have for each is in ``library``.
# AMX would be a fourth one: it needs a tile form of the dense product in linear.cpp, whose packing fits it.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
    "avx512bf16": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma", "-mf16c"),
}
# Contraction off: where a multiply-add is fused is written in the source, so builds of one variant agree.
COMPILE_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-pthread")
COMPILERS = ("g++", "clang++", "c++")
MANIFEST = "build.json"  # compiler and digests; written last, so a directory that has it is complete
TIMEOUT_S = 1800.0


class NativeBuildError(Exception):
    """The libraries cannot be made here; the torch forms run instead."""


def build(*, force: bool = False) -> Path:
    """Make the libraries of all variants unless they are there and intact; returns their directory.

    Args:
        force: make them anyway.

    Raises:
        NativeBuildError: no compiler, or it failed, or nowhere to write.
    """
    compiler = find_compiler()
    identity = _compiler_identity(compiler)
    reasons = []
    for directory in library_directories():
        if not force and intact(directory, compiler=identity):
            return directory
    for directory in library_directories():
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".build-") as temporary:
                _compile_all(compiler, identity, Path(temporary))
                _put_in_place(Path(temporary), directory)
        except OSError as error:
            reasons.append(f"{directory.parent} cannot be written ({error.strerror})")
            continue
        _drop_older(directory)
        return directory
    raise NativeBuildError("; ".join(reasons))


def find_compiler() -> str:
    """Path of the first C++ compiler found.

    Raises:
        NativeBuildError: there is none.
    """
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            return path
    raise NativeBuildError(f"no C++ compiler found ({', '.join(COMPILERS)}); install one")


def library_directories() -> tuple[Path, ...]:
    """Where the libraries of these sources may lie: beside this file, then in the user's cache."""
    key = source_key()
    return Path(__file__).parent / "lib" / key, user_cache_directory() / "native" / key


@cache
def source_key() -> str:
    """Digest of sources and flags."""
    digest = hashlib.sha256(json.dumps([VARIANTS, COMPILE_FLAGS, LINK_FLAGS]).encode())
    for file in sorted(SOURCES.iterdir()):
        if file.suffix in (".cpp", ".h"):
            digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def intact(directory: Path, *, compiler: str | None = None) -> bool:
    """Whether a directory holds every library as it was built (by that compiler, where one is given)."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        digests = dict(manifest["digests"])
        told_compiler = manifest["compiler"]
        found = {variant: _digest(directory / f"{variant}.so") for variant in VARIANTS}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found == digests and compiler in (None, told_compiler)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _compiler_identity(compiler: str) -> str:
    return _run([compiler, "--version"]).splitlines()[0]


def _compile_all(compiler: str, identity: str, directory: Path) -> None:
    """Every source for every variant, several at a time, then one link per variant."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = {variant: [directory / f"{variant}-{source.stem}.o" for source in sources] for variant in VARIANTS}
    commands = [
        [compiler, *COMPILE_FLAGS, *flags, "-c", str(source), "-o", str(target)]
        for variant, flags in VARIANTS.items()
        for source, target in zip(sources, objects[variant], strict=True)
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(_run, commands))
    for variant, files in objects.items():
        _run([compiler, *LINK_FLAGS, *map(str, files), "-o", str(directory / f"{variant}.so")])
        for file in files:
            file.unlink()
    digests = {variant: _digest(directory / f"{variant}.so") for variant in VARIANTS}
    manifest = json.dumps({"compiler": identity, "digests": digests}, indent=1)
    (directory / MANIFEST).write_text(manifest, encoding="utf-8")


def _run(command: Sequence[str]) -> str:
    """Output of a command.

    Raises:
        NativeBuildError: it cannot be run or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} cannot be run ({error})") from error
    if done.returncode:
        raise NativeBuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def _put_in_place(made: Path, directory: Path) -> None:
    """Move finished files; each is replaced whole, and the manifest comes last."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{variant}.so" for variant in VARIANTS), MANIFEST):
        os.replace(made / name, directory / name)


def _drop_older(directory: Path) -> None:
    """Remove libraries of other sources beside these; a process that has one open keeps it."""
    for other in directory.parent.iterdir():
        if other != directory and re.fullmatch(r"[0-9a-f]{16}", other.name):
            shutil.rmtree(other, ignore_errors=True)


def main() -> None:
    """Build and say where, or why not; the torch forms make up for a missing library, so that is no failure."""
    parser = argparse.ArgumentParser(prog="python -m outrider.ops.native.build", description="Build the native ops.")
    parser.add_argument("--force", action="store_true", help="build even if the libraries are up to date")
    try:
        directory = build(force=parser.parse_args().force)
    except NativeBuildError as error:
        print(f"native operations not built, the torch forms will run: {error}", file=sys.stderr)
    else:
        print(f"native operations: {directory}")


if __name__ == "__main__":
    main()
