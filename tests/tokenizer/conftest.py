"""Two small tokenizers with the K3 special tokens: a trained tokenizer.json and a synthetic tiktoken.model."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders as library_decoders

from outrider.tokenizer import Tokenizer, load_tokenizer

STRUCTURE = ("<|open|>", "<|close|>", "<|sep|>")
SPECIALS = ("[BOS]", "[EOS]", "<|end_of_msg|>", *STRUCTURE, "[EOT]", "<|media_pad|>", "<osagent_mode>", "[PAD]")
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the message role is user or assistant",
    '<|open|>message role="user"<|sep|> hello hello [EOS] <|close|>response<|sep|><|end_of_msg|>',
    "a b  c   d    caf\u00e9 \u65e5\u672c\u8a9e \U0001f600 na\u00efve",
] * 4


def build_library_tokenizer() -> LibraryTokenizer:
    """A byte-level BPE trained on text that is full of marker look-alikes, then given the K3 specials."""
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(name, special=name not in STRUCTURE, normalized=False) for name in SPECIALS])
    return tokenizer


def write_tiktoken(folder: Path, **config: object) -> Path:
    """256 byte tokens in reverse order plus a few merges, and names for some special ids."""
    ranks = [bytes([byte]) for byte in reversed(range(256))]
    ranks += [b"he", b"ll", b"hell", b"hello", b" w", "\u00e9".encode(), b"<|", b"|>", b"op"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    declared = {
        str(len(ranks) + offset): {"content": name, "special": name not in STRUCTURE}
        for offset, name in enumerate(SPECIALS)
    }
    content = {"eos_token": "[EOS]", "added_tokens_decoder": declared, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    build_library_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[EOS]"}}))
    return folder


@pytest.fixture(scope="session")
def tiktoken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiktoken(tmp_path_factory.mktemp("tiktoken"))


@pytest.fixture(scope="session", params=["hf", "tiktoken"])
def tokenizer(request: pytest.FixtureRequest, hf_folder: Path, tiktoken_folder: Path) -> Tokenizer:
    return load_tokenizer({"hf": hf_folder, "tiktoken": tiktoken_folder}[request.param])


@pytest.fixture
def edit_hf(hf_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy tokenizer.json through a function that changes the parsed document."""

    def edit(change: Callable[[dict], None]) -> Path:
        document = json.loads((hf_folder / "tokenizer.json").read_text())
        change(document)
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        return tmp_path

    return edit


@pytest.fixture
def make_tiktoken(tmp_path: Path) -> Callable[..., Path]:
    """Write the synthetic K3 files into a fresh folder; keywords go into tokenizer_config.json."""

    def make(**config: object) -> Path:
        return write_tiktoken(tmp_path, **config)

    return make
