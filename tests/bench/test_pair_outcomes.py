"""What is read off drafts at known anchors, by hand and against the rounds of the engine."""

from pathlib import Path

import pytest
import torch

from outrider.bench.pair_outcomes import Outcomes, TextOutcome, draft_texts, gain_of
from outrider.bench.pair_texts import PairText, TextSettings, write_texts
from outrider.bench.workload import demo_prompt_path, load_prompt_set
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.load import load_vocabulary
from outrider.models.dspark.block import BlockPredictor
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.models.protocol import TargetModel
from outrider.models.registry import load_target
from outrider.request import Request, SamplingParams
from outrider.speculative.drafter import DSparkDrafter

MODELS = Path(__file__).resolve().parents[2] / "models"
MAX_TOKENS, MAX_LEN = 40, 512


def text(accepted: list[int], known: list[int], *, is_greedy: bool = True, confidence=None) -> TextOutcome:
    return TextOutcome(
        is_greedy=is_greedy,
        accepted_S=torch.tensor(accepted),
        known_S=torch.tensor(known),
        confidence_SG=None if confidence is None else torch.tensor(confidence, dtype=torch.float64),
    )


def test_shares_walk_and_gain_by_hand() -> None:
    one = Outcomes(texts=(text([2, 0, 1, 0], [2, 2, 2, 1]), text([2], [2], is_greedy=False)), num_drafts=2)
    assert one.num_anchors == 5 and one.mean_accepted == 1.0
    assert one.survival() == (2 / 4, 1 / 3)  # the last anchor cannot judge a second draft
    assert one.conditional() == (2 / 4, 1 / 2)
    walk = one.walk()  # anchor 0 gives 3 tokens, then anchor 3, whose block the text cuts
    assert (walk.tokens_per_round, walk.num_rounds) == (3.0, 1)
    other = Outcomes(texts=(text([0, 0, 0, 0], [2, 2, 2, 1]), text([1], [2], is_greedy=False)), num_drafts=2)
    gain = gain_of(one, other)
    assert gain.mean == 4 / 5 and gain.low > 0
    assert gain_of(other, one).high < 0
    assert (gain_of(one, one).low, gain_of(one, one).high) == (0.0, 0.0)


def test_calibration_counts_only_drafts_that_are_reached() -> None:
    rows = [[0.9, 0.2], [0.3, 0.8]]
    calibration = Outcomes(texts=(text([1, 0], [2, 2], confidence=rows),), num_drafts=2).calibration()
    assert calibration is not None
    assert calibration.mean_confidence == pytest.approx((0.6, 0.2))
    assert calibration.acceptance == (0.5, 0.0)
    assert calibration.expected_error == pytest.approx((0.1 + 0.3 + 0.2) / 3)
    assert Outcomes(texts=(text([1, 0], [2, 2]),), num_drafts=2).calibration() is None


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target(MODELS / "k3-small", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def predictor(target: TargetModel) -> BlockPredictor:
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    return load_predictor(MODELS / "k3-small-dspark", target, tables, max_context=MAX_LEN)


@pytest.fixture(scope="module")
def texts(target: TargetModel, predictor: BlockPredictor) -> tuple[PairText, ...]:
    tokenizer, _ = load_vocabulary(MODELS / "k3-small")
    assert tokenizer is not None
    rows = sorted(load_prompt_set(demo_prompt_path()).prompts, key=lambda row: len(row.text))[:4]
    prompts = [tuple(tokenizer.render_chat([{"role": "user", "content": row.text}])) for row in rows]
    settings = TextSettings(
        num_anchors=60,
        max_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        seats=2,
        stop_token_ids=tuple(tokenizer.stop_token_ids),
    )
    return write_texts(target, prompts, predictor.config.aux_layer_ids, "mixture", settings, lambda count: None)


def rounds_of_the_engine(target: TargetModel, predictor: BlockPredictor, prompt: tuple[int, ...]) -> list[int]:
    """Tokens of every round after the prompt's."""
    config = resolve_config(
        EngineLimits(),
        max_num_seqs=1,
        max_model_len=MAX_LEN,
        num_draft_tokens=7,
        chunk_multiple=target.chunk_multiple,
    )
    drafter = DSparkDrafter(predictor, num_cache_rows=config.cache.num_pages * config.cache.page_size)
    engine = build_engine(target, drafter, config, device=torch.device("cpu"))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    engine.submit(Request(request_id="r", prompt_token_ids=prompt, sampling=sampling))
    lengths = []
    while engine.has_work:
        lengths += [len(update.new_token_ids) for update in engine.step() if update.new_token_ids]
    return lengths[1:]


def test_anchors_accept_what_rounds_of_the_engine_accept(target, predictor, texts) -> None:
    outcomes = draft_texts(predictor, texts, range(len(predictor.config.aux_layer_ids)))
    assert outcomes.num_anchors >= 60
    compared = []
    for known, outcome in zip(texts, outcomes.texts, strict=True):
        assert known.is_greedy and outcome.accepted_S.numel() == known.num_anchors
        lengths = rounds_of_the_engine(target, predictor, known.token_ids[: known.num_prompt])
        position, walked = 0, []
        while position < known.num_anchors and outcome.known_S[position] == outcomes.num_drafts:
            walked.append(1 + int(outcome.accepted_S[position]))
            position += walked[-1]
        assert walked == lengths[: len(walked)]
        compared += walked
    assert len(compared) > 10 and max(compared) > 1


def test_taps_are_those_of_every_token_but_the_last(target, texts) -> None:
    for known in texts:
        assert known.taps_TAD.shape[0] == len(known.token_ids) - 1
