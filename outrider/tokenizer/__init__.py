"""Text to token ids and back, chat rendering and incremental detokenization, behind one protocol.

Nothing in this package imports torch, and no file of a checkpoint is ever executed.
"""

from outrider.tokenizer.base import Tokenizer
from outrider.tokenizer.chat import answer_stop_ids
from outrider.tokenizer.detokenizer import IncrementalDetokenizer
from outrider.tokenizer.load import load_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "answer_stop_ids", "load_tokenizer"]
