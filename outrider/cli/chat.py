"""`outrider chat`: a conversation, line by line, on a terminal or through pipes."""

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

from outrider.cli.arguments_pair import Chat
from outrider.cli.checkpoints import resolve_checkpoint, shipped_drafter
from outrider.cli.runtime import loading_bar, resolve_dtype, set_threads
from outrider.engine.llm import LLM
from outrider.errors import RequestError
from outrider.request import FinishReason, RequestUpdate, SamplingParams
from outrider.tokenizer import Tokenizer, answer_stop_ids

__all__ = ["Conversation", "run_chat"]

PROMPT = "> "
HELP = "/spec on|off  drafts on or off;  /stats  totals;  /reset  forget the conversation;  /quit  end"


@dataclass(slots=True, kw_only=True)
class Totals:
    """Answers so far, with or without drafts."""

    num_answers: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.num_answers:
            return "no answers"
        per_round = f", {self.num_tokens / self.num_rounds:.2f} tokens/round" if self.num_rounds else ""
        drafts = f", {self.num_accepted} of {self.num_drafted} drafts stood" if self.num_drafted else ""
        speed = self.num_tokens / self.seconds if self.seconds else 0.0
        return f"{self.num_answers} answers, {self.num_tokens} tokens, {speed:.1f} tokens/s{per_round}{drafts}"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages, settings and totals of one run; ``answer`` and ``command`` are all that changes them.

    Args:
        llm: with or without a drafter.
        tokenizer: renders the messages in the checkpoint's chat form.
        sampling: of every answer.
        max_tokens: of an answer at most.
        system: text of the first message; "" for none.
        has_drafter: whether drafts can be turned on.
    """

    llm: LLM
    tokenizer: Tokenizer
    sampling: SamplingParams
    max_tokens: int
    system: str
    has_drafter: bool
    uses_drafts: bool = True
    messages: list[Mapping[str, object]] = field(default_factory=list)
    totals: dict[bool, Totals] = field(default_factory=lambda: {True: Totals(), False: Totals()})

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str, write: Callable[[str], object]) -> str:
        """Say something, hand the answer over as it comes, and return a line about it.

        An interrupt ends the answer at the next round. What was said so far stays in the conversation.

        Args:
            text: the user's message.
            write: gets the pieces of the answer.

        Raises:
            RequestError: the conversation no longer fits the context; the new message is taken back.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        token_ids = self.tokenizer.render_chat(messages)
        room = self.llm.max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(token_ids)} tokens, but the context {self.llm.max_model_len}; "
                "/reset starts anew"
            )
        with_drafts = self.has_drafter and self.uses_drafts
        sampling = replace(
            self.sampling, speculation="auto" if with_drafts else "off", max_tokens=min(self.max_tokens, room)
        )
        said, timer = list[RequestUpdate](), _Timer()
        with closing(self.llm.stream(token_ids, sampling)) as updates, _interrupts() as interrupted:
            for update in updates:
                timer.note(update)
                said.append(update)
                write(update.new_text)
                if interrupted:
                    break
        self.messages = [*messages, {"role": "assistant", "content": "".join(update.new_text for update in said)}]
        return self._closing_line(said[-1], timer, with_drafts)

    def command(self, line: str) -> str | None:
        """What a line that begins with a slash answers; None to end."""
        match line.split():
            case ["/quit" | "/exit"]:
                return None
            case ["/reset"]:
                self.reset()
                return "conversation forgotten"
            case ["/stats"]:
                return f"with drafts: {self.totals[True]}\nwithout: {self.totals[False]}"
            case ["/spec", "on"] if not self.has_drafter:
                return "no drafter was loaded; start with --drafter D"
            case ["/spec", "on" | "off" as word]:
                self.uses_drafts = word == "on"
                return f"drafts are {word}"
            case _:
                return HELP

    def _closing_line(self, last: RequestUpdate, timer: "_Timer", with_drafts: bool) -> str:
        totals = self.totals[with_drafts]
        totals.num_answers += 1
        totals.num_tokens += timer.num_tokens
        totals.num_rounds += timer.num_rounds
        totals.seconds += timer.seconds
        if last.usage is not None:
            totals.num_drafted += last.usage.num_drafted
            totals.num_accepted += last.usage.num_accepted
        speed = timer.num_tokens / timer.seconds if timer.seconds else 0.0
        per_round = timer.num_tokens / timer.num_rounds if timer.num_rounds else 0.0
        end = "interrupted" if last.finish_reason is None else str(last.finish_reason)
        if last.finish_reason is FinishReason.ERROR:
            end = f"failed: {last.error}"
        return (
            f"[{timer.num_all} tokens, {speed:.1f} tokens/s, {per_round:.2f} tokens/round, drafts "
            f"{'on' if with_drafts else 'off'}, {end}]"
        )


@dataclass(slots=True)
class _Timer:
    """Tokens, rounds and seconds after the first token, which belongs to reading the prompt."""

    num_all: int = 0  # the first token too
    num_tokens: int = 0
    num_rounds: int = 0
    seconds: float = 0.0
    _first_s: float | None = None

    def note(self, update: RequestUpdate) -> None:
        """Take an update in as it comes."""
        now_s = time.perf_counter()
        self.num_all += len(update.new_token_ids)
        if self._first_s is None:
            self._first_s = now_s if update.new_token_ids else None
            return
        self.num_tokens += len(update.new_token_ids)
        self.num_rounds += bool(update.new_token_ids)
        self.seconds = now_s - self._first_s


def run_chat(command: Chat) -> int:
    """Talk until /quit or the end of the input; returns the exit status."""
    set_threads(command.threads)
    drafter = command.drafter or shipped_drafter(command.model)
    if not drafter:
        print(f"no drafter ships with {command.model}: plain decoding; --drafter D adds one", file=sys.stderr)
    with loading_bar(command.model) as progress:
        llm = LLM(
            resolve_checkpoint(command.model),
            drafter=resolve_checkpoint(drafter) if drafter else None,
            dtype=resolve_dtype(command.dtype),
            device=command.device,
            experts=command.experts,
            max_num_seqs=1,
            numerics=command.numerics,
            probe=command.probe,
            progress=progress,
        )
    if llm.tokenizer is None:
        raise RequestError(f"{command.model} has no tokenizer files, so there is no text to talk in; add them")
    sampling = SamplingParams(
        temperature=command.temperature,
        top_p=command.top_p,
        seed=command.seed,
        stop_token_ids=answer_stop_ids(llm.tokenizer),
    )
    conversation = Conversation(
        llm=llm,
        tokenizer=llm.tokenizer,
        sampling=sampling,
        max_tokens=command.max_tokens,
        system=command.system,
        has_drafter=bool(drafter),
    )
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    _talk(conversation, _lines())
    return 0


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects an interrupt instead of raising it in the middle of a round; a second one is raised.

    Yields the interrupts so far.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _talk(conversation: Conversation, lines: Iterable[str]) -> None:
    """Answers and what is said about them on stdout, errors on stderr."""
    for line in lines:
        if not line.strip():
            continue
        if line.startswith("/"):
            said = conversation.command(line)
            if said is None:
                return
            print(said, flush=True)
            continue
        try:
            said = conversation.answer(line, _write)
        except RequestError as error:
            print("outrider:", " ".join(str(error).split()), file=sys.stderr)
        else:
            print(f"\n{said}", flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _lines() -> Iterator[str]:
    """Lines of stdin without their ends; at a terminal with a prompt, and an interrupt there ends nothing."""
    while True:
        try:
            yield input(PROMPT) if sys.stdin.isatty() else _piped_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)


def _piped_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
