"""Texts that a target wrote, with the taps a drafter reads: what a pair is measured on.

Taps come from the decoding itself, so they are what the drafter would see in service.

Dims: T tokens, A tapped layers, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.engine.loops import ends_in_loop
from outrider.errors import EngineFault, RequestError
from outrider.models.protocol import AuxStream, TargetModel
from outrider.request import FinishReason, Request, SamplingParams
from outrider.training.recorder import TapRecorder

__all__ = ["PairText", "TextSettings", "write_texts"]

LOOP_CHECK = 8  # output tokens between two looks for a loop: acceptance in a loop says nothing of a text
SAMPLED = 0.7  # temperature of further passes over the prompts
MAX_PASSES = 20  # over the prompts, until there are enough anchors


@dataclass(frozen=True, slots=True, kw_only=True)
class PairText:
    """A prompt, what the target wrote after it, and the taps of every token but the last."""

    token_ids: tuple[int, ...]
    num_prompt: int
    is_greedy: bool
    taps_TAD: torch.Tensor

    @property
    def num_anchors(self) -> int:
        """Output tokens that have a successor; the first is at position ``num_prompt``."""
        return len(self.token_ids) - self.num_prompt - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How much is written."""

    num_anchors: int  # at least, where the prompts allow it
    max_tokens: int  # of one answer
    max_model_len: int
    seats: int
    stop_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Answer:
    """A prompt that is being answered."""

    prompt: tuple[int, ...]
    is_greedy: bool
    output: list[int]


def write_texts(
    target: TargetModel,
    prompts: Sequence[tuple[int, ...]],
    layer_ids: tuple[int, ...],
    stream: AuxStream,
    settings: TextSettings,
    progress: Callable[[int], None],
) -> tuple[PairText, ...]:
    """Let the target answer prompts without a drafter, greedily; further passes over them are drawn.

    Args:
        target: its taps are set.
        prompts: token ids; each leaves room for an answer.
        layer_ids: taps to keep, "output of layer t", in this order.
        stream: which stream is tapped.
        settings: how much.
        progress: gets the number of new anchors.

    Raises:
        RequestError: the answers are too short to hold an anchor.
        EngineFault: the target failed.
    """
    recorder = TapRecorder(layer_ids)
    recorder.aux_hidden_stream = stream
    config = resolve_config(
        EngineLimits(),
        max_num_seqs=settings.seats,
        max_model_len=settings.max_model_len,
        num_draft_tokens=0,
        chunk_multiple=target.chunk_multiple,
    )
    engine = build_engine(target, recorder, config, device=target.embedding.device)
    texts: list[PairText] = []
    for index in range(MAX_PASSES):
        missing = settings.num_anchors - sum(text.num_anchors for text in texts)
        if missing <= 0:
            break
        begun = len(texts)
        for first in range(0, len(prompts), settings.seats):
            answers = _answer(engine, prompts[first : first + settings.seats], settings, index)
            _release_ended(engine, prompts[first])
            new = [text for answer in answers if (text := _text(answer, recorder)) is not None]
            recorder.finished.clear()
            texts += new
            num_new = sum(text.num_anchors for text in new)
            progress(min(num_new, max(missing, 0)))
            missing -= num_new
            if missing <= 0:
                break
        if len(texts) == begun:
            break
    if not texts:
        raise RequestError(
            f"the target's answers to {len(prompts)} prompts have no two tokens each; give other prompts or raise "
            "--max-tokens"
        )
    return tuple(texts)


def _answer(
    engine: Engine, prompts: Sequence[tuple[int, ...]], settings: TextSettings, pass_index: int
) -> list[_Answer]:
    """Answer prompts side by side; an answer that loops is cut there."""
    running: dict[str, _Answer] = {}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=0.0 if pass_index == 0 else SAMPLED,
            seed=pass_index,
            max_tokens=settings.max_tokens,
            stop_token_ids=settings.stop_token_ids,
            ignore_eos=True,
        )
        request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)
        running[request.request_id] = _Answer(prompt=prompt, is_greedy=pass_index == 0, output=[])
        engine.submit(request)
    answers = list(running.values())
    while running:
        for update in engine.step():
            answer = running.get(update.request_id)
            if answer is None:
                continue
            answer.output.extend(update.new_token_ids)
            if update.finish_reason is FinishReason.ERROR:
                raise EngineFault(f"the target failed on a prompt of {len(answer.prompt)} tokens: {update.error}")
            if update.finish_reason is not None:
                del running[update.request_id]
            elif len(answer.output) % LOOP_CHECK == 0 and ends_in_loop(answer.output):
                engine.abort(update.request_id)
                del running[update.request_id]
    return answers


def _release_ended(engine: Engine, prompt: tuple[int, ...]) -> None:
    """Let the recorder hand over what ended: an idle engine does so when a request is given up, not by itself."""
    engine.submit(Request(request_id="nobody", prompt_token_ids=prompt, sampling=SamplingParams()))
    engine.abort("nobody")


def _text(answer: _Answer, recorder: TapRecorder) -> PairText | None:
    """The answer with its taps; None if it has no anchor."""
    token_ids = (*answer.prompt, *answer.output)
    # Before a stop id the last token was computed too; a cut or aborted answer may be one token ahead or behind.
    taps_TAD = recorder.finished.get(token_ids, recorder.finished.get(token_ids[:-1]))
    if len(answer.output) < 2 or taps_TAD is None:
        return None
    return PairText(
        token_ids=token_ids,
        num_prompt=len(answer.prompt),
        is_greedy=answer.is_greedy,
        taps_TAD=taps_TAD[: len(token_ids) - 1],
    )
