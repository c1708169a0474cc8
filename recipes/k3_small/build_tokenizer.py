"""Train the byte-level BPE of k3-small: 8,192 ids, the last 16 of them special.

Usage: ``python recipes/k3_small/build_tokenizer.py CORPUS.jsonl OUT_DIR [--megabytes 20]``
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[EOT]",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<osagent_mode>",
    "<|reserved_token_8188|>",
    "<|reserved_token_8189|>",
    "[UNK]",
    "[PAD]",
)
# As in K3, the structure tokens are not "special": a decoder prints them unless it strips them.
STRUCTURE_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
# Words with one leading space, single digits, punctuation runs, and white space that keeps the
# last blank for the next word; the shape of the K2/K3 pattern without its Han and case rules.
SPLIT_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sample_texts(corpus: Path, num_bytes: int, seed: int = 1) -> Iterator[str]:
    """Yield documents of the corpus in a fixed random order until ``num_bytes`` are spent."""
    lines = corpus.read_text(encoding="utf8").splitlines()
    random.Random(seed).shuffle(lines)
    for line in lines:
        text = json.loads(line)["text"]
        num_bytes -= len(text)
        if num_bytes < 0:
            return
        yield text


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train the BPE and append the special tokens, so that they take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    for name in SPECIAL_TOKENS:
        special = name not in STRUCTURE_TOKENS
        tokenizer.add_tokens([AddedToken(name, special=special, normalized=False)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def main() -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=20.0)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(sample_texts(arguments.corpus, int(arguments.megabytes * 1e6)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 4096,
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
