"""Where a checkpoint name points to."""

from pathlib import Path

from outrider.errors import CheckpointError
from outrider.models.pretrained import PRETRAINED, pretrained_checkpoint

__all__ = ["resolve_checkpoint", "shipped_drafter"]

CHECKOUT = Path(__file__).resolve().parents[2]
SHIPPED_DRAFTERS = {"k3-small": "k3-small-dspark", "smollm2": "smollm2-135m-dspark"}  # by the target's name


def resolve_checkpoint(name: str, *, checkout: Path = CHECKOUT) -> Path:
    """The directory that `name` means.

    It is a path as it stands, else a name under `models/` of the working directory, else a path or a name
    under `models/` of the checkout that this package lies in. A known name that is none of these, such as
    `smollm2`, is fetched and imported at first use.

    Raises:
        CheckpointError: there is no such directory, or the known model cannot be fetched.
    """
    candidates = (Path(name), Path("models") / name, checkout / name, checkout / "models" / name)
    for candidate in candidates:
        if name and _is_directory(candidate):
            return candidate
    if name in PRETRAINED:
        return pretrained_checkpoint(name)
    tried = ", ".join(str(candidate) for candidate in dict.fromkeys(candidates))
    raise CheckpointError(
        f"no checkpoint {name!r} (tried {tried}); give a directory that holds a config.json, "
        f"or one of the known names: {', '.join(PRETRAINED)}"
    )


def shipped_drafter(model: str, *, checkout: Path = CHECKOUT) -> str:
    """Name of the drafter that ships with a model, given by name or path; "" where none does or it is not here."""
    name = SHIPPED_DRAFTERS.get(Path(model).name, "")
    is_here = name and any(_is_directory(root / "models" / name) for root in (Path(), checkout))
    return name if is_here else ""


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that no file can have, or a parent that may not be searched
        return False
