"""Replays of a machine whose every anchor is known: exact where they must be, and close where drafts are drawn."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from outrider.bench.replay import policy_named, replay, typical_confidence
from outrider.bench.round_costs import RoundCosts
from outrider.bench.round_file import Anchor, PromptPart, RecordedRound, Text, read_round_file, texts_of
from outrider.errors import RequestError

G = 5
RATES = (0.9, 0.7, 0.6, 0.5, 0.4)  # of each draft, given those before it


def survival() -> tuple[float, ...]:
    values, product = [], 1.0
    for rate in RATES:
        product *= rate
        values.append(product)
    return tuple(values)


def whole_text(number: int, length: int, *, by_length: bool = True, unseen: int = 0, prompt_rows=(16, 5)) -> Text:
    """A text of which every position is known as an anchor."""
    dice, begin = random.Random(number), sum(prompt_rows)
    end = begin + 1 + length
    anchors = {}
    for position in range(begin, end):
        budget = min(G, end - position - 2) if by_length else G
        budget = max(budget, 0)
        accepted = next((k for k in range(budget) if dice.random() >= RATES[k]), budget)
        emitted = min(accepted + 1, end - 1 - position)
        anchors[position] = Anchor(
            request=f"r{number}", position=position, budget=budget, rule="greedy", band="0", verified=budget,
            accepted=accepted, survival_G=survival() if budget else (), emitted=emitted, finished=False,
            by_length=False, unseen=0,
        )  # fmt: skip
    return Text(
        request=f"r{number}", prompt_rows=prompt_rows, first_emitted=1, begin=begin, end=end, unseen=unseen,
        by_length=by_length, anchors=anchors,
    )  # fmt: skip


def visited_by_whole_blocks(text: Text) -> Text:
    """What a run that verifies whole blocks records of it."""
    position, kept = text.begin, {}
    while position < text.end - 1 + text.unseen:
        kept[position] = text.anchors[position]
        position += text.anchors[position].accepted + 1
    return dataclasses.replace(text, anchors=kept)


def machine() -> RoundCosts:
    """A step of S sequences and R rows takes 10 + S + 2 R ms, a proposal of m 3 + m, the host 1, a prompt row 0.5."""
    rounds = []
    for sequences in range(1, 5):
        for verified in range(G + 1):
            anchors = tuple(
                dataclasses.replace(whole_text(0, 40, by_length=False).anchors[21], verified=verified, accepted=0)
                for _ in range(sequences)
            )
            rows = sequences * (1 + verified)
            step_s, propose_s = (10 + sequences + 2 * rows) * 1e-3, (3 + sequences) * 1e-3
            rounds += [
                RecordedRound(
                    anchors=anchors, prompts=(), propose_s=propose_s, step_s=step_s, host_s=1e-3, num_steps=1
                )
            ] * 3  # fmt: skip
    return RoundCosts(rounds)


def run(texts, policy: str, *, concurrency: int = 1, seed: int = 0):
    make_policy, num_drafts = policy_named(policy, G)
    return replay(
        texts, make_policy, num_drafts, machine(), concurrency=concurrency, typical_G=RATES, seed=seed
    )  # fmt: skip


def facts(replayed) -> dict:
    return {**dataclasses.asdict(replayed), "num_stand_ins": 0}


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("kind", ["length", "stop", "hidden_stop"])
@pytest.mark.parametrize("policy", ["plain", f"fixed{G}"])
def test_plain_and_the_recorded_policy_are_replayed_exactly(concurrency: int, kind: str, policy: str):
    texts = [
        whole_text(number, 30 + number, by_length=kind == "length", unseen=int(kind == "hidden_stop"))
        for number in range(6)
    ]
    replayed = run([visited_by_whole_blocks(text) for text in texts], policy, concurrency=concurrency)
    assert facts(replayed) == facts(run(texts, policy, concurrency=concurrency))
    assert replayed.num_stand_ins == 0
    assert replayed.num_tokens == sum(30 + number for number in range(6))


def test_plain_decoding_by_hand():
    text = whole_text(0, 10)
    plain = run([text], "plain")
    assert (plain.num_tokens, plain.num_spans, plain.num_rounds) == (10, 10, 10)
    assert plain.decode_s == pytest.approx(10 * (10 + 1 + 2 + 1) * 1e-3)
    hidden = run([whole_text(0, 10, by_length=False, unseen=1)], "plain")
    assert (hidden.num_tokens, hidden.num_spans) == (10, 11)  # one more round finds the stop id


def test_whole_blocks_by_hand():
    text = whole_text(3, 24, by_length=False)
    replayed, position, spans, accepted = run([text], f"fixed{G}"), text.begin, 0, 0
    while position < text.end - 1:
        accepted += text.anchors[position].accepted
        position += text.anchors[position].accepted + 1
        spans += 1
    assert (replayed.num_spans, replayed.num_accepted, replayed.num_verified) == (spans, accepted, spans * G)
    assert replayed.decode_s == pytest.approx(spans * (10 + 1 + 2 * (1 + G) + 3 + 1 + 1) * 1e-3)


def test_shorter_blocks_accept_what_was_recorded_up_to_their_length():
    text = whole_text(1, 200, by_length=False)
    for length in range(1, G):
        replayed = run([text], f"fixed{length}")
        position, accepted = text.begin, 0
        while position < text.end - 1:
            accepted += min(text.anchors[position].accepted, length)
            position += min(text.anchors[position].accepted, length) + 1
        assert replayed.num_accepted == accepted
        assert set(replayed.lengths) == {length}


def test_stand_ins_are_counted_and_come_close_on_average():
    texts = [whole_text(number, 400, by_length=False) for number in range(8)]
    truth = run(texts, "fixed2")
    runs = [run([visited_by_whole_blocks(text) for text in texts], "fixed2", seed=seed) for seed in range(3)]
    assert truth.num_stand_ins == 0
    for replayed in runs:
        assert 0.1 < replayed.num_stand_ins / replayed.num_proposals < 0.9
        assert replayed.num_tokens == truth.num_tokens
        assert replayed.tokens_per_round == pytest.approx(truth.tokens_per_round, rel=0.08)
    assert runs[0] == run([visited_by_whole_blocks(text) for text in texts], "fixed2", seed=0)


def test_auto_beats_what_does_not_pay():
    texts = [whole_text(number, 300, by_length=False) for number in range(4)]
    plain, auto = run(texts, "plain"), run(texts, "auto")
    assert auto.num_tokens == plain.num_tokens
    assert auto.tokens_per_second > 1.1 * plain.tokens_per_second


@pytest.mark.parametrize("name", ["", "fixed", "fixed0", f"fixed{G + 1}", "fixed-1", "fixed1.5", "best", "fixed99999"])
def test_unknown_policies_are_named(name: str):
    with pytest.raises(RequestError, match="policy"):
        policy_named(name, G)


def test_texts_that_accept_by_coins_are_refused():
    text = whole_text(0, 9)
    anchors = {
        position: dataclasses.replace(anchor, rule="block", band="0.85+") for position, anchor in text.anchors.items()
    }
    with pytest.raises(RequestError, match="coins"):
        run([dataclasses.replace(text, anchors=anchors)], "plain")


def test_costs_are_the_shapes_own_or_between_their_neighbours():
    costs = machine()
    assert costs.step(2, 4) == pytest.approx(20e-3)
    assert costs.step(2, 5) == pytest.approx(22e-3)  # between 4 and 6 rows
    assert costs.step(2, 40) == pytest.approx(92e-3, rel=0.02)  # beyond: the plane
    assert costs.step(0, 0, 16) == 0
    assert (costs.propose(3), costs.propose(0), costs.host(1)) == pytest.approx((6e-3, 0, 1e-3))
    assert (costs.num_asked, costs.num_known) == (4, 1)
    with pytest.raises(RequestError, match="costs"):
        RoundCosts([])


def test_a_prompt_row_costs_what_it_added():
    anchors = (dataclasses.replace(whole_text(0, 40, by_length=False).anchors[21], verified=0, accepted=0),)

    def round_of(rows: int, step_s: float) -> RecordedRound:
        prompts = (PromptPart(request="p", position=0, rows=rows, emitted=0, finished=False),) if rows else ()
        return RecordedRound(anchors=anchors, prompts=prompts, propose_s=0, step_s=step_s, host_s=0, num_steps=1)

    costs = RoundCosts([*[round_of(0, 0.01)] * 3, round_of(10, 0.03), round_of(30, 0.05)])
    assert costs.step(1, 1, 20) == pytest.approx(0.01 + 20 * (0.02 + 0.04) / 40)


def sequence_line(**changes) -> dict:
    return {
        "request": "a", "position": 5, "emitted": 2, "finished": None, "unseen": 0, "budget": 3, "rule": "greedy",
        "band": "0", "verified": 3, "accepted": 1, "confidence": [0.1, 0.2, 0.3], "survival": [0.5, 0.3, 0.1],
    } | changes  # fmt: skip


def round_line(*sequences: dict, **changes) -> dict:
    names = ("propose_s", "batch_s", "forward_s", "accept_s", "commit_s", "observe_s", "host_s")
    return {
        "record": "round",
        "times": dict.fromkeys(names, 1e-3),
        "num_steps": 1,
        "sequences": list(sequences),
    } | changes


HEADER = {"record": "header", "format": "outrider-rounds", "version": 1, "settings": {}}
PROMPT = {"request": "a", "position": 0, "emitted": 1, "finished": None, "unseen": 0, "prompt_rows": 5}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_lines_become_texts_and_an_id_may_come_again(tmp_path: Path):
    last = sequence_line(position=7, emitted=1, accepted=0, finished="length")
    one = (round_line(PROMPT), round_line(sequence_line()), round_line(last))
    given_up = (round_line(PROMPT), round_line(sequence_line()))
    only_prompt = (round_line(PROMPT),)
    end = {"record": "end", "reason": "max_rounds"}
    file = read_round_file(written(tmp_path, HEADER, *one, *given_up, *one, *only_prompt, end))
    texts, num_left_out = texts_of(file.rounds)
    assert file.is_cut
    assert (len(texts), num_left_out) == (3, 1)
    assert (texts[1].end, sorted(texts[1].anchors)) == (8, [5])  # it ends where its record ends
    text = texts[2]
    assert (text.prompt_rows, text.begin, text.end, text.by_length) == ((5,), 5, 9, True)
    assert sorted(text.anchors) == [5, 7]
    assert typical_confidence(texts) == (3 / 5, 0.0, 0.5)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no header"),
        ([round_line()], "no header"),
        ([HEADER | {"version": 2}], "version=2"),
        ([HEADER | {"format": "x"}], "format='x'"),
        (["{"], "rounds.jsonl:1 is not valid JSON"),
        ([HEADER, "[]"], "rounds.jsonl:2 is no JSON object"),
        ([HEADER, {"record": "other"}], "rounds.jsonl:2 is no round record (record='other' is unknown)"),
        ([HEADER, round_line(times=3)], "times must be an object"),
        ([HEADER, round_line(times={})], "lacks 'propose_s'"),
        ([HEADER, round_line(num_steps=-1)], "num_steps=-1"),
        ([HEADER, round_line(sequence_line(accepted=4))], "accepted=4"),
        ([HEADER, round_line(sequence_line(emitted=3))], "emitted=3"),
        ([HEADER, round_line(sequence_line(rule="luck"))], "rule='luck'"),
        ([HEADER, round_line(sequence_line(survival=[2]))], "survival=[2]"),
        ([HEADER, round_line(PROMPT | {"prompt_rows": "5"})], "prompt_rows='5'"),
        ([HEADER, round_line(3)], "rounds.jsonl:2 is no round record"),
    ],
)
def test_malformed_records_are_named(lines: list, words: str, tmp_path: Path):
    with pytest.raises(RequestError) as caught:
        read_round_file(written(tmp_path, *lines))
    assert words in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(RequestError, match="cannot read"):
        read_round_file(tmp_path / "absent")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot read"):
        read_round_file(tmp_path / "bytes")
