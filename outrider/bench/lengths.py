"""Prompts of a wanted number of tokens, made from a prompt file, always the same from the same file."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from outrider.bench.workload import BenchPrompt
from outrider.errors import ConfigError

__all__ = ["at_length", "parse_length"]

LENGTH = re.compile(r"(\d{1,6})(k?)")
GAP = "\n\n"

Count = Callable[[str], int]


def parse_length(text: str) -> int:
    """Tokens of `256` or `2k`; k is 1024.

    Raises:
        ConfigError: it is neither.
    """
    match = LENGTH.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--prompt-length {text!r} is no length; use tokens such as 256, 1k or 2k")
    return int(match[1]) * (1024 if match[2] else 1)


def at_length(prompts: Sequence[BenchPrompt], num_tokens: int, count: Count) -> Iterator[BenchPrompt]:
    """The prompts, one by one, each at most `num_tokens` long and as near to it as characters allow.

    A prompt that names its filler (`body_span`) is cut at the end of the filler. One that is shorter gets other
    prompts of the same list in front, from the next one on, in rotation and again if need be, cut at their end: the
    task stays whole and stays last. One without filler that is longer cannot be cut, and is left out.

    Args:
        prompts: of one tier.
        num_tokens: in the form that the engine gets, chat form included.
        count: tokens of a text in that form.
    """
    made = (_fitted(prompts, index, num_tokens, count) for index in range(len(prompts)))
    return (prompt for prompt in made if prompt is not None)


@dataclass(frozen=True, slots=True)
class _Cuttable:
    """A text of which only the first so many characters of the middle are kept."""

    head: str
    middle: str
    tail: str

    def keep(self, num_characters: int) -> str:
        return self.head + self.middle[:num_characters] + self.tail

    def fitted(self, num_tokens: int, count: Count) -> str:
        """The longest form that has at most so many tokens; that without a middle must."""
        low, high = 0, len(self.middle)
        while low < high:
            middle = (low + high + 1) // 2
            if count(self.keep(middle)) <= num_tokens:
                low = middle
            else:
                high = middle - 1
        return self.keep(low)


def _fitted(prompts: Sequence[BenchPrompt], index: int, num_tokens: int, count: Count) -> BenchPrompt | None:
    prompt = prompts[index]
    begin, end = prompt.body_span or (0, 0)
    form = _Cuttable(prompt.text[:begin], prompt.text[begin:end], prompt.text[end:])
    if count(form.keep(0)) > num_tokens:
        return None
    if count(prompt.text) <= num_tokens:
        form = _Cuttable("", _filler(prompts, index, num_tokens - count(prompt.text)), GAP + prompt.text)
        if count(form.keep(0)) > num_tokens:  # no room for the gap
            return prompt
    return dataclasses.replace(prompt, text=form.fitted(num_tokens, count), body_span=None)


def _filler(prompts: Sequence[BenchPrompt], index: int, num_tokens: int) -> str:
    """Texts of the other prompts, certainly more than `num_tokens` of them."""
    parts: list[str] = []
    num_words = 0
    for prompt in cycle([*prompts[index + 1 :], *prompts[: index + 1]]):
        if num_words > num_tokens:  # a word is a token at least
            break
        parts.append(prompt.text)
        num_words += max(1, len(prompt.text.split()))
    return GAP.join(parts)
