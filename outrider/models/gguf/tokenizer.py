"""The tokenizer inside a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``: byte-level BPE only."""

from collections.abc import Mapping
from typing import Any

from outrider.errors import CheckpointError, UnsupportedError
from outrider.models.gguf.file import GgufFile

__all__ = ["tokenizer_documents"]

# Kinds of tokens, as the file format numbers them.
CONTROL, USER_DEFINED = 3, 4

DIGITS = {"type": "Digits", "individual_digits": True}
BYTES_OF_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {**BYTES_OF_WORDS, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


# How text is cut before merging, by the name that the file gives. Digits: in threes (Llama 3) or one by one.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "gpt-2": BYTES_OF_WORDS,
    "smollm": _sequence(DIGITS, BYTES_OF_WORDS),
    "llama-bpe": _sequence(_split(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"), BYTES),
    "qwen2": _sequence(_split(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"), BYTES),
}
# A whole word that is a token is taken without merging.
IGNORES_MERGES = frozenset({"llama-bpe"})
NORMALIZERS = {"qwen2": {"type": "NFC"}}


def tokenizer_documents(file: GgufFile, *, context: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of ``tokenizer.json`` and of ``tokenizer_config.json``.

    Args:
        file: the model file.
        context: positions of the model.

    Raises:
        UnsupportedError: the tokenizer is no byte-level BPE, or cuts text in an unknown way.
        CheckpointError: fields are missing or contradict each other.
    """
    model, pre = file.text("tokenizer.ggml.model"), file.text("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{file.path.name}: tokenizer model {model!r} with pre-tokenizer {pre!r} is not imported; byte-level BPE "
            f"('gpt2') with {', '.join(PRE_TOKENIZERS)} is"
        )
    tokens, kinds = file.items("tokenizer.ggml.tokens", str), file.items("tokenizer.ggml.token_type", int)
    merges = file.items("tokenizer.ggml.merges", str)
    if len(tokens) != len(kinds) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{file.path.name}: {len(tokens)} tokens, {len(set(tokens))} of them different, with {len(kinds)} kinds; "
            "download it again"
        )
    added = [
        {"id": token_id, "content": token, "special": kind == CONTROL, **dict.fromkeys(FLAGS, False)}
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": NORMALIZERS.get(pre),
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": BYTES_OF_WORDS,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in IGNORES_MERGES,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": list(merges),
        },
    }
    return document, _config(file, tokens, context)


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _config(file: GgufFile, tokens: Any, context: int) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    for name, field in NAMED.items():
        token_id = file.token_id(f"tokenizer.ggml.{field}_token_id")
        if token_id is None:
            continue
        if token_id >= len(tokens):
            raise CheckpointError(f"{file.path.name}: {field} token id {token_id} is outside the {len(tokens)} tokens")
        config[name] = tokens[token_id]
    template = file.optional_text("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
