"""`outrider import-gguf`: a GGUF file as a checkpoint directory in the Hugging Face form."""

from pathlib import Path

from outrider.cli.arguments import ImportGguf
from outrider.cli.runtime import loading_bar
from outrider.engine.load import DTYPES
from outrider.models.gguf.convert import import_gguf

__all__ = ["run_import_gguf"]


def run_import_gguf(command: ImportGguf) -> int:
    """Convert and print where the checkpoint is; returns the exit status."""
    source = Path(command.file)
    out = Path(command.out) if command.out else source.with_suffix("")
    with loading_bar(source.name) as progress:
        import_gguf(source, out, dtype=DTYPES[command.dtype], progress=progress)
    print(out)
    return 0
