"""Lets a target answer prompts and keeps what a drafter learns from: tokens, taps, last hidden states.

The taps come from the decoding itself: a recording drafter, which never proposes, takes them in as a real one would.
So the data are what the drafter will see in service, and no second pass of the target is needed. Everything is
appended batch by batch and survives an interruption.

Dims: N tokens of all conversations, A tapped layers (the last one included), D model width.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.loops import ends_in_loop
from outrider.errors import CheckpointError
from outrider.models.protocol import AuxStream, TargetModel
from outrider.request import Request, SamplingParams
from outrider.speculative.drafter import Anchors, ObservedSpans

__all__ = ["CollectedFiles", "Collector", "CollectorSettings", "Conversation", "TapRecorder"]

FORMAT = 1
LOOP_CHECK = 16  # output tokens between two looks for a loop
MIN_OUTPUT_TOKENS = 14  # what says less teaches next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt, the answer with its stop token, and the taps of every token but the last."""

    token_ids: tuple[int, ...]
    num_prompt: int
    features_TAD: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """How prompts are answered."""

    seats: int = 32  # prompts answered side by side
    max_prompt_tokens: int = 768
    max_output_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)  # taking turns
    seed: int = 0


class TapRecorder:
    """A drafter that proposes nothing and keeps the taps of every committed token, by state slot."""

    num_draft_tokens = 0
    aux_hidden_stream: AuxStream = "mixture"

    def __init__(self, aux_layer_ids: tuple[int, ...]) -> None:
        self.aux_layer_ids = aux_layer_ids
        self.finished: dict[tuple[int, ...], torch.Tensor] = {}  # taps [T, A, D] of a released sequence, by its ids
        self._ids: dict[int, list[int]] = {}
        self._taps: dict[int, list[torch.Tensor]] = {}

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """Nothing."""
        return None

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Take in the rows of a step, all of them committed."""
        assert output.aux_hidden_TAD is not None, "taps were asked for"
        token_ids, taps_TAD = batch.token_ids_T.tolist(), output.aux_hidden_TAD.clone()
        for group, slots in ((batch.step, spans.step_slots), (batch.chunk, spans.chunk_slots)):
            rows, begin = group.rows_T.tolist(), 0
            for slot, length in zip(slots, group.lengths, strict=True):
                first, last = rows[begin], rows[begin + length - 1] + 1
                self._ids[slot].extend(token_ids[first:last])
                self._taps[slot].append(taps_TAD[first:last])
                begin += length

    def reset(self, slots: Sequence[int]) -> None:
        """Start sequences."""
        for slot in slots:
            self._ids[slot], self._taps[slot] = [], []

    def release(self, slots: Sequence[int]) -> None:
        """Hand sequences over."""
        for slot in slots:
            taps = self._taps.pop(slot)
            ids = tuple(self._ids.pop(slot))
            if taps:
                self.finished[ids] = torch.cat(taps)

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Not needed: the collector never preempts."""
        raise CheckpointError("a collecting engine was asked to preempt; give it pages for all seats")

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """See ``snapshot``."""
        raise CheckpointError("a collecting engine was asked to preempt; give it pages for all seats")


@dataclass(slots=True)
class _Counts:
    """Of everything so far."""

    asked: int = 0
    kept: int = 0
    looping: int = 0
    short: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


class CollectedFiles:
    """The files of a collection; appending to what an earlier run left.

    ``ids.bin`` int32, ``answer.bin`` uint8 (1 = output), ``features.bin`` bfloat16 [N, A, D], ``offsets.npy`` int64
    of the conversations, ``state.json``.

    Args:
        directory: made if needed.
        identity: what must agree with an earlier run: target, taps, settings.

    Raises:
        CheckpointError: the directory holds another collection.
    """

    def __init__(self, directory: Path, identity: dict[str, object]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.counts, self.offsets = directory, _Counts(), [0]
        self._identity = {"format": FORMAT, **identity}
        state = directory / "state.json"
        if state.is_file():
            content = json.loads(state.read_text(encoding="utf-8"))
            if content["identity"] != json.loads(json.dumps(self._identity)):
                raise CheckpointError(f"{directory} holds a collection of {content['identity']}; use another directory")
            self.counts = _Counts(**content["counts"])
            self.offsets = np.load(directory / "offsets.npy").tolist()
        self._row_bytes = 0
        self._files: dict[str, BinaryIO] = {}

    def append(self, conversation: Conversation) -> None:
        """Write one conversation behind the others; ``flush`` makes it part of the collection."""
        ids, num_prompt = conversation.token_ids, conversation.num_prompt
        features = conversation.features_TAD.to(torch.bfloat16).contiguous()
        padded = torch.cat([features, features.new_zeros(len(ids) - len(features), *features.shape[1:])])
        width = padded[0].numel() * 2
        self._file("ids", 4).write(np.array(ids, dtype=np.int32).tobytes())
        self._file("answer", 1).write(bytes(num_prompt) + b"\1" * (len(ids) - num_prompt))
        self._file("features", width).write(padded.view(torch.int16).numpy().tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))
        self.counts.kept += 1
        self.counts.output_tokens += len(ids) - num_prompt

    def flush(self) -> None:
        """Make everything so far survive an interruption."""
        for file in self._files.values():
            file.flush()
        np.save(self.directory / "offsets.npy", np.array(self.offsets, dtype=np.int64))
        counts = {name: getattr(self.counts, name) for name in _Counts.__slots__}
        state = self.directory / "state.json"
        temporary = state.with_suffix(".tmp")
        temporary.write_text(json.dumps({"identity": self._identity, "counts": counts}), encoding="utf-8")
        temporary.replace(state)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str, item_bytes: int) -> BinaryIO:
        """The file to append to, cut back to the last whole conversation when it is opened."""
        if name not in self._files:
            path = self.directory / f"{name}.bin"
            path.touch()
            file = path.open("r+b")
            file.truncate(self.offsets[-1] * item_bytes)
            file.seek(0, 2)
            self._files[name] = file
        return self._files[name]


@dataclass(slots=True)
class _Running:
    """A prompt that is being answered."""

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    is_wanted: bool = True


class Collector:
    """Answers prompts with many seats at once and writes the conversations.

    Args:
        target: the model; its taps are set.
        aux_layer_ids: the drafter's taps, output of layer t; the last layer is added for the teacher.
        stop_token_ids: what ends an answer; it is kept, so that a drafter sees the end coming.
        settings: how.
        files: where to.
    """

    def __init__(
        self,
        target: TargetModel,
        aux_layer_ids: tuple[int, ...],
        stop_token_ids: frozenset[int],
        settings: CollectorSettings,
        files: CollectedFiles,
    ) -> None:
        self._settings, self._files, self._stop_token_ids = settings, files, stop_token_ids
        self._recorder = TapRecorder((*aux_layer_ids, target.num_layers - 1))
        config = resolve_config(
            EngineLimits(),
            max_num_seqs=settings.seats,
            max_model_len=settings.max_prompt_tokens + settings.max_output_tokens,
            num_draft_tokens=0,
            chunk_multiple=target.chunk_multiple,
        )
        self._engine = build_engine(target, self._recorder, config, device=target.embedding.device)
        self._running: dict[str, _Running] = {}
        self._ended: list[_Running] = []

    def run(
        self, prompts: Iterator[Sequence[int]], *, num_tokens: int, progress: Callable[[int, float], None]
    ) -> None:
        """Answer prompts until the collection has ``num_tokens`` output tokens or there are no more.

        Args:
            prompts: token ids; longer ones than the settings allow are skipped.
            num_tokens: of the whole collection, earlier runs included.
            progress: called now and then with (output tokens, seconds) of the whole collection.
        """
        counts, begun = self._files.counts, time.monotonic() - self._files.counts.seconds
        dice = random.Random(f"{self._settings.seed}/{counts.asked}")
        is_open = True
        while True:
            while is_open and len(self._running) < self._settings.seats and counts.output_tokens < num_tokens:
                is_open = self._submit(prompts, dice)
            if not self._running and not self._engine.has_work:
                break
            self._step()
            if len(self._ended) >= self._settings.seats:
                self._write()
                counts.seconds = time.monotonic() - begun
                self._files.flush()
                progress(counts.output_tokens, counts.seconds)
        self._write()
        counts.seconds = time.monotonic() - begun
        self._files.flush()
        progress(counts.output_tokens, counts.seconds)

    def _submit(self, prompts: Iterator[Sequence[int]], dice: random.Random) -> bool:
        prompt = next(prompts, None)
        if prompt is None:
            return False
        if not 0 < len(prompt) <= self._settings.max_prompt_tokens:
            return True
        counts = self._files.counts
        temperature = self._settings.temperatures[counts.asked % len(self._settings.temperatures)]
        sampling = SamplingParams(
            temperature=temperature,
            seed=dice.randrange(2**31),
            max_tokens=self._settings.max_output_tokens,
            ignore_eos=True,
        )
        request = Request(
            request_id=f"prompt-{counts.asked}", prompt_token_ids=tuple(prompt), sampling=sampling, arrival_time=0.0
        )
        counts.asked += 1
        self._engine.submit(request)
        self._running[request.request_id] = _Running(tuple(prompt))
        return True

    def _step(self) -> None:
        for update in self._engine.step():
            running = self._running.get(update.request_id)
            if running is None:
                continue
            running.output.extend(update.new_token_ids)
            stopped = bool(running.output) and running.output[-1] in self._stop_token_ids
            looping = len(running.output) % LOOP_CHECK == 0 and ends_in_loop(running.output)
            if looping:
                running.is_wanted = False
            if (stopped or looping) and update.finish_reason is None:
                self._engine.abort(update.request_id)
            if stopped or looping or update.finish_reason is not None:
                self._ended.append(self._running.pop(update.request_id))

    def _write(self) -> None:
        """Match what ended with what was recorded; a sequence is released with the round after its last."""
        if not self._engine.has_work and self._ended:
            self._engine.step()
        counts, waiting = self._files.counts, []
        for ended in self._ended:
            ids = (*ended.prompt, *ended.output)
            features = self._recorder.finished.pop(ids[:-1], None)
            if features is None and ids[:-1] and self._engine.has_work:
                waiting.append(ended)
            elif not ended.is_wanted or ends_in_loop(ended.output):
                counts.looping += 1
            elif len(ended.output) < MIN_OUTPUT_TOKENS:
                counts.short += 1
            elif features is not None:
                self._files.append(Conversation(token_ids=ids, num_prompt=len(ended.prompt), features_TAD=features))
        self._ended = waiting
        if len(self._recorder.finished) > 4 * self._settings.seats:
            self._recorder.finished.clear()  # of requests that nobody waits for
