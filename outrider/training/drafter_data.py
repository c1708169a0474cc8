"""What ``collecting`` wrote, as batches for a drafter.

Dims: B rows of a batch, T tokens of a row, N tokens of all conversations, M tapped layers with the last one, D width,
A anchors of a row, R = A * G block rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from outrider.errors import CheckpointError
from outrider.training.dspark import Blocks, DrafterConfig

__all__ = ["Batch", "Collection", "sample_blocks"]

MIN_OUTPUTS = 16  # output tokens a row needs
VALID_SHARE = 0.03  # of the conversations, the last ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Conversations, each from its begin; zero behind their ends."""

    ids_BT: torch.Tensor  # int64
    answer_BT: torch.Tensor  # bool, the target's outputs
    features_BTMD: torch.Tensor  # float32


class Collection:
    """Conversations of a collection; features stay on disk.

    Args:
        directory: what ``CollectedFiles`` wrote.

    Raises:
        CheckpointError: it holds no collection, or too few conversations to keep some for evaluation.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self.identity = json.loads((directory / "state.json").read_text(encoding="utf-8"))["identity"]
            self.offsets = np.load(directory / "offsets.npy")
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{directory} holds no collection of conversations ({error})") from error
        num_tokens = int(self.offsets[-1])
        self.ids = np.fromfile(directory / "ids.bin", np.int32, num_tokens)
        self.answer = np.fromfile(directory / "answer.bin", np.uint8, num_tokens)
        width = int(self.identity["num_features"]), int(self.identity["hidden_size"])
        self._features = np.memmap(directory / "features.bin", np.int16, "r", shape=(num_tokens, *width))
        num_conversations = len(self.offsets) - 1
        self.num_train = num_conversations - max(1, round(num_conversations * VALID_SHARE))
        if self.num_train < 1:
            raise CheckpointError(f"{directory} holds {num_conversations} conversations; collect 2 or more")

    @property
    def num_output_tokens(self) -> int:
        """Outputs of all conversations."""
        return int(self.answer.sum())

    def frequent_ids(self, vocab_size: int, count: int, always: frozenset[int]) -> torch.Tensor:
        """The ``count`` ids that are output most often, and those of ``always`` among them; ascending, int64."""
        counts = np.bincount(self.ids[self.answer == 1], minlength=vocab_size).astype(float)
        counts += np.bincount(self.ids[self.answer == 0], minlength=vocab_size) * 1e-3
        counts[sorted(always)] = np.inf
        picked = np.sort(np.argsort(-counts, kind="stable")[:count])
        return torch.from_numpy(picked.astype(np.int64))

    def coverage(self, draft_ids: torch.Tensor) -> float:
        """Share of the outputs that are among these ids."""
        outputs = self.ids[self.answer == 1]
        return float(np.isin(outputs, draft_ids.numpy()).mean()) if len(outputs) else 0.0

    def rows(self, dice: np.random.Generator, length: int, num_rows: int, *, valid: bool) -> Batch:
        """Random conversations, one a row, so that context always starts at position 0."""
        low, high = (self.num_train, len(self.offsets) - 1) if valid else (0, self.num_train)
        picked: list[slice] = []
        for _ in range(1000 * num_rows):
            if len(picked) == num_rows:
                break
            index = int(dice.integers(low, high))
            start, end = int(self.offsets[index]), int(self.offsets[index + 1])
            where = slice(start, min(end, start + length))
            if self.answer[where].sum() >= MIN_OUTPUTS:  # a long prompt may leave no output in the row
                picked.append(where)
        if not picked:
            raise CheckpointError(f"no conversation has {MIN_OUTPUTS} output tokens within {length}; collect longer ones")
        return self._batch(picked, length)

    def _batch(self, picked: list[slice], length: int) -> Batch:
        ids = torch.zeros(len(picked), length, dtype=torch.int64)
        answer = torch.zeros(len(picked), length, dtype=torch.bool)
        features = torch.zeros(len(picked), length, *self._features.shape[1:])
        for row, where in enumerate(picked):
            size = where.stop - where.start
            ids[row, :size] = torch.from_numpy(self.ids[where].astype(np.int64))
            answer[row, :size] = torch.from_numpy(self.answer[where] == 1)
            features[row, :size] = torch.from_numpy(np.array(self._features[where])).view(torch.bfloat16).float()
        return Batch(ids_BT=ids, answer_BT=answer, features_BTMD=features)


def sample_blocks(batch: Batch, config: DrafterConfig, num_anchors: int, seed: int) -> Blocks:
    """Random anchors p with outputs at p and p + 1 (with replacement) and their block rows.

    The last prompt token is never an anchor: the first anchor in service is the first output.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, answer, rows = batch.ids_BT, batch.answer_BT, config.block_rows
    eligible = (answer[:, :-1] & answer[:, 1:]).float()
    anchors = torch.multinomial(eligible, num_anchors, replacement=True, generator=generator)
    length = ids.shape[1]
    positions = anchors.unsqueeze(-1) + torch.arange(1, rows + 1)
    inside = positions < length
    positions = positions.clamp_max(length - 1).flatten(1)
    labels = ids.gather(1, positions)
    learnable = (answer.gather(1, positions).unflatten(1, (-1, rows)) & inside).cumprod(-1)
    anchor_ids = ids.gather(1, anchors).unsqueeze(-1)
    previous = torch.cat((anchor_ids, labels.unflatten(1, (-1, rows))[..., :-1]), -1)
    inputs = torch.full_like(previous, config.mask_token_id)
    inputs[..., 0] = anchor_ids.squeeze(-1)
    return Blocks(
        anchors_BA=anchors,
        inputs_BR=inputs.flatten(1),
        labels_BR=labels,
        previous_BR=previous.flatten(1),
        weights_BR=learnable.flatten(1).float(),
    )
