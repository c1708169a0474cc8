"""A target and a drafter that are tables, so that every probability of their output is known.

The target's distribution depends on the last two tokens, the earlier of which it reads from its paged
cache, as a real one reads its context. The drafter's depends on the last token only.

Dims: T flat tokens, N rows that need logits, S sequences, V vocabulary.
"""

from collections.abc import Sequence

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.cache import PagedLayout, RecurrentLayout
from outrider.models.dspark.drawing import DraftDraws
from outrider.models.protocol import AuxStream, TargetCaches
from outrider.ops.select import first_maximum
from outrider.plan import ScheduledSequence
from outrider.speculative.drafter import Anchors, ObservedSpans

__all__ = ["TableDrafter", "TableTarget"]


class TableTarget:
    """Logits are ``table[token before the last + 1, last token]``; index 0 stands for no token.

    Args:
        vocab_size: V.
        seed: of the table.
        sharpness: standard deviation of the logits.
        dtype: of logits and cache.
    """

    hidden_size, num_layers, chunk_multiple = 1, 1, 1
    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, *, seed: int, sharpness: float, dtype: torch.dtype = torch.float64) -> None:
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(vocab_size + 1, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        self.table = (sharpness * table).to(dtype)

    @property
    def cache_layouts(self) -> tuple[PagedLayout, RecurrentLayout]:
        """Token ids in pages; no recurrent layer."""
        f64 = torch.float64
        return (
            PagedLayout(name="latents", num_layers=1, row_shape=(1,), dtype=f64),
            RecurrentLayout(
                name="recurrent",
                num_layers=0,
                state_shape=(1, 1, 1),
                state_dtype=f64,
                conv_shape=(1, 1),
                conv_dtype=f64,
            ),
        )

    @property
    def embedding(self) -> torch.Tensor:
        """Not a part of a table."""
        raise NotImplementedError

    @property
    def lm_head(self) -> torch.Tensor:
        """Not a part of a table."""
        raise NotImplementedError

    def set_aux_layers(self, layer_ids: tuple[int, ...], stream: AuxStream) -> None:
        """Nothing can be tapped."""
        assert not layer_ids, "a table has no layers to tap"

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Not a part of a table."""
        raise NotImplementedError

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Not a part of a table."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        """Write the tokens, read the ones before, look up."""
        caches.latents.write(0, batch.slot_mapping_T, batch.token_ids_T[:, None].double())
        rows_N = batch.logits_rows_N
        before_N = batch.positions_T[rows_N] - 1
        pages_NP = batch.page_table_SP[batch.sequence_T[rows_N]]
        earlier_N = before_N.clamp_min(0)
        cells_N = pages_NP.gather(1, (earlier_N // batch.page_size)[:, None])[:, 0] * batch.page_size
        tokens_N = caches.latents.rows(0)[cells_N + earlier_N % batch.page_size][:, 0].long()
        previous_N = torch.where(before_N < 0, 0, tokens_N + 1)
        return TargetOutput(logits_NV=self.table[previous_N, batch.token_ids_T[rows_N]], aux_hidden_TAD=None)


class TableDrafter:
    """Logits of a draft are ``table[token before it]``; drafts are chosen as DSpark chooses them.

    Args:
        table_VV: logits of the next token, per token.
        num_draft_tokens: drafts per round.
    """

    aux_layer_ids: tuple[int, ...] = ()
    aux_hidden_stream: AuxStream = "mixture"

    def __init__(self, table_VV: torch.Tensor, num_draft_tokens: int) -> None:
        self.table_VV = table_VV
        self.num_draft_tokens = num_draft_tokens

    lapsed: frozenset[int] = frozenset()

    def lapse(self, slots: Sequence[int]) -> None:
        """Nothing to give up."""

    def foresee(self, item: ScheduledSequence) -> None:
        """See Drafter; nothing is read."""

    def propose(self, anchors: Anchors) -> DraftBlock:
        """One block for every anchor."""
        draws = None
        if anchors.sampling is not None:
            draws = DraftDraws(
                anchors.sampling,
                anchor_positions_S=anchors.positions_S,
                target_ids_U=None,
                vocab_size=self.table_VV.shape[1],
            )
        previous_S, drafts = anchors.token_ids_S, []
        for index in range(self.num_draft_tokens):
            logits_SV = self.table_VV[previous_S]
            previous_S = first_maximum(logits_SV) if draws is None else draws(logits_SV, index)
            drafts.append(previous_S)
        return DraftBlock(
            token_ids_SG=torch.stack(drafts, 1),
            confidence_SG=None,
            probs_SGV=None if draws is None else draws.probs(),
        )

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """The anchor is all it needs."""

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing to start."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget."""
