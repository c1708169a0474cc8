"""Loading: which files are read, which are refused, and that no checkpoint code runs."""

import base64
import json

import pytest

from outrider.errors import (
    CapacityError,
    EngineFault,
    OutriderError,
    RequestError,
    TokenizerError,
    UnsupportedError,
    UserError,
)
from outrider.tokenizer import load_tokenizer
from outrider.tokenizer.literals import read_effort_message, read_split_pattern
from outrider.tokenizer.tiktoken_k3 import K3_SPLIT_PATTERN


def test_stop_ids_are_the_union_of_all_sources(hf_folder, make_tiktoken):
    eos = load_tokenizer(hf_folder).special_token_id("[EOS]")
    assert load_tokenizer(hf_folder).stop_token_ids == {eos}
    assert load_tokenizer(hf_folder, eos_token_id=7).stop_token_ids == {eos, 7}
    assert load_tokenizer(hf_folder / "tokenizer.json", eos_token_id=[7, 8]).stop_token_ids == {eos, 7, 8}
    folder = make_tiktoken()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [267, 5]}))
    assert load_tokenizer(folder, eos_token_id=6).stop_token_ids == {266, 267, 5, 6}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 267}))
    assert load_tokenizer(folder).stop_token_ids == {266, 267}


@pytest.mark.parametrize("eos", [521, -1, True, "x", [1, None], 1.5])
def test_bad_eos_ids_are_rejected(make_tiktoken, eos):
    with pytest.raises(TokenizerError, match="eos_token_id="):
        load_tokenizer(make_tiktoken(), eos_token_id=eos)


def test_bad_eos_name_is_rejected(make_tiktoken):
    with pytest.raises(TokenizerError, match="'<nope>' is not an added token"):
        load_tokenizer(make_tiktoken(eos_token="<nope>"))
    with pytest.raises(TokenizerError, match="eos_token=3"):
        load_tokenizer(make_tiktoken(eos_token=3))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"3": {"content": "x"}}, "inside the 265 base ranks"),
        ({"265": {"content": "x"}, "266": {"content": "x"}}, "collides"),
        ({"270": {"content": "<|reserved_token_271|>"}}, "collides"),
        ({"nine": {"content": "x"}}, "malformed"),
        ({"270": {}}, "malformed"),
        ([1], "not an object"),
    ],
)
def test_bad_special_names_are_rejected(make_tiktoken, declared, words):
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(make_tiktoken(added_tokens_decoder=declared, eos_token=None))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda lines: lines[1:], "ranks that are not exactly 0 to 263"),
        (lambda lines: [*lines, lines[0]], "264 lines|266 lines"),
        (lambda lines: [*lines, b"!!! 265"], "cannot be read as base64"),
        (lambda lines: [*lines, b"YQ=="], "cannot be read as base64"),
        (lambda lines: [base64.b64encode(b"zzz") + b" 0", *lines[1:]], "no token for 1 of the 256 bytes.*0xFF"),
    ],
)
def test_bad_ranks_are_rejected(make_tiktoken, edit, words):
    folder = make_tiktoken()
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    (folder / "tiktoken.model").write_bytes(b"\n".join(edit(lines)))
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda doc: doc["model"].update(type="WordPiece"), "WordPiece"),
        (lambda doc: doc.update(decoder={"type": "Metaspace"}), "ByteLevel decoder"),
        (lambda doc: doc.update(pre_tokenizer=None), "ByteLevel pre_tokenizer"),
        (lambda doc: doc["model"]["vocab"].pop("!"), "1 of the 256 bytes, the first that text needs is 0x21"),
        (lambda doc: doc["model"].update(merges=[["a"]]), "malformed"),
        (lambda doc: doc["added_tokens"].append({"content": "x"}), "malformed"),
        (lambda doc: doc["added_tokens"].append({"content": "\ud800", "id": 999, "special": True}), "UTF-8"),
        (lambda doc: doc["model"]["vocab"].update({"\ud800": 999}), "UTF-8"),
        (lambda doc: doc["added_tokens"].append({"content": ["x"], "id": 1, "special": True}), "malformed"),
        (lambda doc: doc["added_tokens"].append({**doc["added_tokens"][0], "id": 999}), "collides"),
        (lambda doc: doc.update(normalizer={"type": "Nope"}), "not accepted"),
    ],
)
def test_bad_tokenizer_json_is_rejected(edit_hf, change, words):
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(edit_hf(change))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(TokenizerError, match="neither tiktoken"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be read as JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(TokenizerError, match="holds list"):
        load_tokenizer(tmp_path)


def test_split_pattern_comes_from_the_checkpoint_unexecuted(make_tiktoken):
    folder = make_tiktoken()
    marker = folder / "executed"
    hello = load_tokenizer(folder).encode("hello")
    (folder / "tokenization_kimi.py").write_text(
        f'open({str(marker)!r}, "w")\nclass T:\n    pat_str = "|".join([r"""l+""", r"[^l]" + "+"])\n'
    )
    tokenizer = load_tokenizer(folder)
    assert not marker.exists()
    assert len(hello) == 1
    assert [tokenizer.decode([token]) for token in tokenizer.encode("hello")] == ["he", "ll", "o"]


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "pat_str = make()",
        "pat_str = 'a'\nclass T:\n    pat_str = 'b'",
        "pat_str = (",
        "pat_str = f'{x}'",
        "\0",
    ],
)
def test_unreadable_pattern_is_an_error_not_a_guess(tmp_path, source):
    path = tmp_path / "tokenization_kimi.py"
    path.write_text(source)
    with pytest.raises(TokenizerError, match=r"tokenization_kimi\.py"):
        read_split_pattern(path)


def test_pattern_that_does_not_compile(make_tiktoken):
    folder = make_tiktoken()
    (folder / "tokenization_kimi.py").write_text("pat_str = '('")
    with pytest.raises(TokenizerError, match="does not compile"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('TEXT = "`thinking_effort` guides: `max`."', "`thinking_effort` guides: `max`."),
        ('def f(e):\n    return "`thinking_effort` guides: " + f"`{e}`.\\n"', "`thinking_effort` guides: `max`."),
        ('TEXT = "`thinking_effort` guides: `{effort}`."', "`thinking_effort` guides: `max`."),
        ('TEXT = f"`thinking_effort` guides {a} {b}"', None),
        ('TEXT = f"`thinking_effort` guides {a()}"', None),
        ('A = "`thinking_effort` guides 1"\nB = "`thinking_effort` guides 2"', None),
        ('T = "`thinking_effort` guides: " + a + b', None),
        ('T = "`thinking_effort` guides: {}.".format(a)', None),
        ('T = f() + [(f"`thinking_effort` guides: `{e}`.", False)] + g()', "`thinking_effort` guides: `max`."),
        ("x = 1", None),
    ],
)
def test_effort_message(tmp_path, source, expected):
    path = tmp_path / "encoding_k3.py"
    path.write_text(source)
    assert read_effort_message(path, "max") == expected


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world's", ["Hello", " world's"]),
        ("camelCase HTTPServer", ["camel", "Case", " HTTPServer"]),
        ("\u65e5\u672cab", ["\u65e5\u672c", "ab"]),
        ("12345", ["123", "45"]),
        ("a  b", ["a", " ", " b"]),
        ("x = {\n\n  y", ["x", " =", " {\n\n", " ", " y"]),
        ("a \n b", ["a", " \n", " b"]),
    ],
)
def test_built_in_pattern_splits_as_described(make_tiktoken, text, pieces):
    """Every expected piece is made one token, so the tokens show where the pattern cuts."""
    folder = make_tiktoken()
    ranks = [bytes([byte]) for byte in range(256)]
    whole = text.encode()
    spans = {whole[i:j] for i in range(len(whole)) for j in range(i + 2, len(whole) + 1)}
    ranks += sorted(spans, key=lambda span: (len(span), span))
    (folder / "tiktoken.model").write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    )
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == pieces
    assert K3_SPLIT_PATTERN.count("Han") == 5


def test_exception_tree():
    assert issubclass(UserError, ValueError)
    assert issubclass(UserError, OutriderError)
    assert issubclass(UnsupportedError, RequestError)
    assert issubclass(CapacityError, RequestError)
    assert issubclass(RequestError, UserError)
    assert issubclass(TokenizerError, UserError)
    assert issubclass(EngineFault, OutriderError)
    assert not issubclass(EngineFault, ValueError)


@pytest.mark.parametrize("token_id", [-1, 1.0, "1", None, True, [1], 10**12, 10**30])
def test_ids_that_are_no_table_index_are_rejected(edit_hf, token_id):
    def change(document):
        document["model"]["vocab"]["a"] = token_id

    with pytest.raises(TokenizerError, match="id"):
        load_tokenizer(edit_hf(change))
