"""A conversation with the shipped pair: drafts change no word, an interrupt ends an answer, pipes work."""

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.cli.chat import Conversation
from outrider.engine.llm import LLM
from outrider.errors import RequestError
from outrider.request import SamplingParams
from outrider.tokenizer import answer_stop_ids

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGET, DRAFTER = MODELS / "k3-small", MODELS / "k3-small-dspark"
QUESTION = "Write a short story about a clockmaker, a lost key and a garden."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TARGET, DRAFTER, speculation=7, max_num_seqs=1, max_model_len=256) as llm:
        yield llm


def conversation(llm: LLM, max_tokens: int = 24, system: str = "") -> Conversation:
    assert llm.tokenizer is not None
    return Conversation(
        llm=llm,
        tokenizer=llm.tokenizer,
        sampling=SamplingParams(stop_token_ids=answer_stop_ids(llm.tokenizer)),
        max_tokens=max_tokens,
        system=system,
        has_drafter=True,
    )


def say(talk: Conversation, text: str) -> tuple[str, str]:
    """The answer and the line about it."""
    parts: list[str] = []
    line = talk.answer(text, parts.append)
    return "".join(parts), line


def test_drafts_change_no_word_of_several_turns(llm: LLM) -> None:
    talks = [conversation(llm), conversation(llm)]
    assert talks[1].command("/spec off") == "drafts are off"
    for text in (QUESTION, "And then?"):
        with_drafts, without = (say(talk, text) for talk in talks)
        assert with_drafts[0] == without[0] and with_drafts[0]
        assert "drafts on" in with_drafts[1] and "drafts off" in without[1]
        assert "tokens/s" in without[1] and "1.00 tokens/round" in without[1]
    assert [message["role"] for message in talks[0].messages] == ["user", "assistant"] * 2
    assert talks[0].messages == talks[1].messages
    assert talks[0].totals[True].num_accepted > 0 == talks[1].totals[False].num_drafted
    assert str(talks[1].command("/stats")).startswith("with drafts: no answers\nwithout: 2 answers")


def test_an_earlier_turn_is_part_of_the_prompt_until_reset(llm: LLM) -> None:
    talk, fresh = conversation(llm, system="Be brief."), conversation(llm, system="Be brief.")
    say(talk, QUESTION)
    say(talk, "And then?")
    talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    assert say(talk, "And then?")[0] == say(fresh, "And then?")[0]


def test_an_interrupt_ends_the_answer_and_not_the_conversation(llm: LLM) -> None:
    talk, handler = conversation(llm, max_tokens=64), signal.getsignal(signal.SIGINT)
    parts: list[str] = []

    def write(text: str) -> None:
        parts.append(text)
        if len(parts) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    line = talk.answer(QUESTION, write)
    assert len(parts) == 2 and line.endswith("interrupted]")
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(parts)}
    assert signal.getsignal(signal.SIGINT) is handler
    assert not llm.engine.has_work
    assert say(talk, "And then?")[0]


def test_a_conversation_that_is_too_long_is_refused_and_stays_as_it_was(llm: LLM) -> None:
    talk = conversation(llm)
    say(talk, QUESTION)
    before = list(talk.messages)
    with pytest.raises(RequestError, match="/reset starts anew"):
        say(talk, "garden " * 300)
    assert talk.messages == before
    assert say(talk, "And then?")[0]


def test_commands_that_are_none_show_the_commands(llm: LLM) -> None:
    talk = conversation(llm)
    assert "/spec on|off" in str(talk.command("/what")) and talk.command("/quit") is None
    talk.has_drafter = False
    assert "no drafter" in str(talk.command("/spec on"))


def test_it_talks_through_pipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [QUESTION, "", "/spec off", QUESTION, "/stats", "/quit", "never reached"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    flags = ["--drafter", str(DRAFTER), "--max-tokens", "16", "--threads", "1"]
    assert main(["chat", str(TARGET), *flags]) == 0
    out = capsys.readouterr().out.splitlines()
    marks = [line for line in out if line.startswith("[")]
    assert len(marks) == 2 and all("tokens/s" in line and "tokens/round" in line for line in marks)
    assert out[-2].startswith("with drafts: 1 answers, ") and out[-1].startswith("without: 1 answers, ")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["chat", "k3-small", "--max-tokens", "4", "--threads", "1"]) == 0
    assert "drafts on" in capsys.readouterr().out  # the shipped drafter is the default, and the input just ends
