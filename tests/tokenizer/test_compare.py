"""Two tokenizers are the same if every id is the same token in both."""

import json

from outrider.tokenizer import load_tokenizer
from outrider.tokenizer.compare import first_difference


def test_a_tokenizer_is_itself(tokenizer):
    assert first_difference(tokenizer, tokenizer) is None


def test_another_text_another_kind_and_a_missing_id_are_found(edit_hf, hf_folder):
    ours = load_tokenizer(hf_folder)

    def swap(document):
        vocab = document["model"]["vocab"]
        vocab["!"], vocab['"'] = vocab['"'], vocab["!"]

    found = first_difference(ours, load_tokenizer(edit_hf(swap)))
    assert found is not None and "text b'!'" in found and "text b'\"'" in found
    last = ours.vocab_size - 1

    def drop_last(document):
        document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] != last]

    shorter = load_tokenizer(edit_hf(drop_last))
    assert first_difference(ours, shorter) == f"token {last} is control token b'[PAD]' here and not assigned there"
    assert first_difference(shorter, ours) == f"token {last} is not assigned here and control token b'[PAD]' there"
    assert first_difference(shorter, ours, ignored=frozenset({last})) is None
    assert first_difference(ours, shorter, ignored=frozenset({last - 1})) is not None


def test_a_control_token_that_text_can_produce_is_another_token(edit_hf, hf_folder):
    ours = load_tokenizer(hf_folder)
    eos = ours.special_token_id("[EOS]")

    def as_text(document):
        document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] != eos]
        document["model"]["vocab"]["[EOS]"] = eos

    folder = edit_hf(as_text)
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    found = first_difference(ours, load_tokenizer(folder))
    assert found == f"token {eos} is control token b'[EOS]' here and text b'[EOS]' there"
