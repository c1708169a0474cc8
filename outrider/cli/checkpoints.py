"""Where a checkpoint name points to."""

from pathlib import Path

from outrider.errors import CheckpointError

__all__ = ["resolve_checkpoint"]

CHECKOUT = Path(__file__).resolve().parents[2]


def resolve_checkpoint(name: str, *, checkout: Path = CHECKOUT) -> Path:
    """The directory that `name` means.

    It is a path as it stands, else a name under `models/` of the working directory, else a path or a name
    under `models/` of the checkout that this package lies in.

    Raises:
        CheckpointError: there is no such directory.
    """
    candidates = (Path(name), Path("models") / name, checkout / name, checkout / "models" / name)
    for candidate in candidates:
        if name and _is_directory(candidate):
            return candidate
    tried = ", ".join(str(candidate) for candidate in dict.fromkeys(candidates))
    raise CheckpointError(f"no checkpoint {name!r} (tried {tried}); give a directory that holds a config.json")


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that no file can have, or a parent that may not be searched
        return False
