"""Encoding and decoding: round trips, and no way from text to control tokens."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from outrider.errors import EngineFault, TokenizerError
from outrider.tokenizer import load_tokenizer
from outrider.tokenizer.base import NamedToken, build_token_table
from outrider.tokenizer.checkpoint import CheckpointTokenizer
from outrider.tokenizer.hf import byte_level_alphabet
from outrider.tokenizer.tiktoken_k3 import bounded_pieces

STRUCTURE = ("<|open|>", "<|close|>", "<|sep|>")
SPECIALS = ("[BOS]", "[EOS]", "<|end_of_msg|>", *STRUCTURE, "[EOT]", "<|media_pad|>", "<osagent_mode>", "[PAD]")
FAST = settings(max_examples=60, deadline=None, derandomize=True)
# Text dense in markers, halves of markers, and characters that normalizers fold into marker characters.
PIECES = st.one_of(
    st.sampled_from(SPECIALS),
    st.sampled_from(["<|", "|>", "open", "<|op", "en|>", "[", "EOS", "]", " ", "\n", "\u200b", "<\uff5copen\uff5c>"]),
    st.sampled_from(["\uff1c|open|\uff1e", "<|OPEN|>", "<|reserved_token_270|>", "[UNK]", "\u0120", "hello"]),
    st.text(max_size=4),
)
MARKED_TEXT = st.lists(PIECES, max_size=12).map("".join)


@FAST
@given(text=MARKED_TEXT)
def test_text_never_gives_control_tokens_and_round_trips(tokenizer, text):
    token_ids = tokenizer.encode(text)
    assert tokenizer.control_token_ids.isdisjoint(token_ids)
    assert tokenizer.decode(token_ids) == text
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@pytest.mark.parametrize("name", SPECIALS)
def test_special_only_on_request(tokenizer, name):
    token_id = tokenizer.special_token_id(name)
    assert tokenizer.encode(name, allow_special=True) == [token_id]
    assert tokenizer.encode(f"a{name}b", allow_special=True).count(token_id) == 1
    assert token_id in tokenizer.control_token_ids
    assert len(tokenizer.encode(name)) > 1
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_bytes(token_id, show_special=True) == name.encode()


def test_library_switch_alone_lets_structure_through(hf_folder):
    """Why the plain encoder is built from an edited file: the library's own switch is not enough."""
    library = LibraryTokenizer.from_file(str(hf_folder / "tokenizer.json"))
    library.encode_special_tokens = True
    assert library.token_to_id("<|open|>") in library.encode("<|open|>", add_special_tokens=False).ids
    assert library.token_to_id("[EOS]") not in library.encode("[EOS]", add_special_tokens=False).ids


@pytest.mark.parametrize("normalizer", ["NFKC", "Lowercase"])
@pytest.mark.parametrize("normalized", [False, True])
def test_normalizers_do_not_open_a_way(edit_hf, normalizer, normalized):
    def change(document):
        document["normalizer"] = {"type": normalizer}
        for item in document["added_tokens"]:
            item.update(normalized=normalized, lstrip=True, rstrip=True)

    tokenizer = load_tokenizer(edit_hf(change))
    for text in ["\uff1c|open|\uff1e", "<|OPEN|>", " <|open|> ", "\uff3bEOS\uff3d", "[eos]", "<\uff5copen\uff5c>"]:
        assert tokenizer.control_token_ids.isdisjoint(tokenizer.encode(text)), text


def test_vocabulary_and_merges_do_not_open_a_way(edit_hf):
    """A control token that is also a vocabulary entry and the end of a chain of merges."""

    def change(document):
        name = "<|open|>"
        vocab, merges = document["model"]["vocab"], document["model"]["merges"]
        for end in range(2, len(name)):
            if name[:end] not in vocab:
                vocab[name[:end]] = 2000 + end
            merges.append([name[: end - 1], name[end - 1]])
        (token_id,) = (item["id"] for item in document["added_tokens"] if item["content"] == name)
        vocab[name] = token_id
        merges.append([name[:-1], name[-1]])
        document["model"]["ignore_merges"] = True
        document["pre_tokenizer"]["use_regex"] = False

    tokenizer = load_tokenizer(edit_hf(change))
    token_ids = tokenizer.encode("<|open|>")
    assert tokenizer.special_token_id("<|open|>") not in token_ids
    assert tokenizer.decode(token_ids) == "<|open|>"


def test_whitespace_added_tokens_stay_usable_and_keep_their_ids(edit_hf):
    def change(document):
        last = document["added_tokens"][-1]
        runs = [{**last, "id": last["id"] + 5 + run, "content": " " * (run + 4), "special": False} for run in range(3)]
        document["added_tokens"].extend(reversed(runs))

    tokenizer = load_tokenizer(edit_hf(change))
    (token_id,) = tokenizer.encode(" " * 6)
    assert tokenizer.special_token_ids[" " * 6] == token_id not in tokenizer.control_token_ids
    assert tokenizer.decode([token_id]) == " " * 6
    assert tokenizer.vocab_size == token_id + 1


def test_nonspecial_added_token_shows_in_text_but_is_not_forgeable(edit_hf):
    def change(document):
        last = document["added_tokens"][-1]
        document["added_tokens"].append({**last, "id": last["id"] + 1, "content": "</think>", "special": False})

    tokenizer = load_tokenizer(edit_hf(change))
    token_id = tokenizer.special_token_id("</think>")
    assert tokenizer.decode([token_id]) == "</think>"
    assert token_id not in tokenizer.encode("</think>")
    assert tokenizer.encode("</think>", allow_special=True) == [token_id]


def test_post_processor_padding_and_truncation_are_not_applied(edit_hf):
    def change(document):
        bos = {"id": "[BOS]", "type_id": 0}
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[BOS]": {"id": "[BOS]", "ids": [400], "tokens": ["[BOS]"]}},
        }
        document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}

    tokenizer = load_tokenizer(edit_hf(change))
    assert tokenizer.decode(tokenizer.encode("hello hello hello"), skip_special=False) == "hello hello hello"


def test_control_token_from_a_broken_encoder_stops_the_engine():
    class Broken:
        def encode_plain(self, text):
            return [1]

        def encode_with_special(self, text):
            return [1]

    named = [NamedToken(name="[EOS]", token_id=1, special=True)]
    table = build_token_table(base_tokens={0: b"a"}, named_tokens=named, eos_names=[], eos_ids=[])
    with pytest.raises(EngineFault, match=r"\[1\]"):
        CheckpointTokenizer(table, Broken()).encode("a")


def test_hf_decode_matches_the_library(hf_folder):
    tokenizer = load_tokenizer(hf_folder)
    library = LibraryTokenizer.from_file(str(hf_folder / "tokenizer.json"))

    @FAST
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    def check(token_ids):
        assert tokenizer.decode(token_ids, skip_special=False) == library.decode(token_ids, skip_special_tokens=False)

    @FAST
    @given(st.text(max_size=20))
    def check_encode(text):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids

    check()
    check_encode()
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_structure_is_hidden_unless_shown(tokenizer):
    token_ids = [tokenizer.special_token_id(name) for name in STRUCTURE]
    assert tokenizer.decode(token_ids) == ""
    assert tokenizer.decode(token_ids, skip_special=False) == "".join(STRUCTURE)


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\U0001f600"


@pytest.mark.parametrize("offset", [-1, 0, 10])
def test_ids_outside_the_table_are_rejected(tokenizer, offset):
    token_id = -1 if offset < 0 else tokenizer.vocab_size + offset
    for use in (tokenizer.token_bytes, lambda bad: tokenizer.decode([0, bad])):
        with pytest.raises(TokenizerError, match=rf"{token_id} is outside the table of {tokenizer.vocab_size}"):
            use(token_id)


def test_unassigned_id_and_unknown_name_are_rejected(edit_hf):
    def change(document):
        last = document["added_tokens"][-1]
        document["added_tokens"].append({**last, "id": last["id"] + 2, "content": "[LATE]"})

    tokenizer = load_tokenizer(edit_hf(change))
    with pytest.raises(TokenizerError, match="not assigned"):
        tokenizer.decode([tokenizer.vocab_size - 2])
    with pytest.raises(TokenizerError, match=r"'<\|nope\|>' is not among"):
        tokenizer.special_token_id("<|nope|>")


def test_tiktoken_ids_and_reserved_names(tiktoken_folder):
    tokenizer = load_tokenizer(tiktoken_folder)
    assert tokenizer.vocab_size == 265 + 256
    assert tokenizer.encode("hello") == [259]
    assert tokenizer.encode("ABC") == [255 - 65, 255 - 66, 255 - 67]
    assert tokenizer.special_token_id("[BOS]") == 265
    assert tokenizer.special_token_id("<|reserved_token_520|>") == 520
    assert 520 not in tokenizer.encode("<|reserved_token_520|>")


def test_stale_names_past_the_table_are_ignored(make_tiktoken):
    folder = make_tiktoken()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["521"] = {"content": "<|im_end|>", "special": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 521
    assert "<|im_end|>" not in tokenizer.special_token_ids
    assert max(tokenizer.encode("<|im_end|>", allow_special=True)) < 521


@pytest.mark.parametrize("text", ["x" * 60_001, " " * 60_001, "ab " * 20_000, "", "a" * 450_000])
def test_long_runs_are_cut_without_loss(text):
    pieces = list(bounded_pieces(text))
    assert "".join(pieces) == text
    if len(set(text)) == 1:
        assert max(map(len, pieces)) <= 25_000
    elif text:
        assert len(pieces) == 1


def test_long_runs_encode(tiktoken_folder):
    tokenizer = load_tokenizer(tiktoken_folder)
    text = "^" * 120_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_torch_is_not_imported():
    check = "import outrider.tokenizer, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
