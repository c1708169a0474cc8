"""How many drafts a request may have at most; how many it gets is decided round by round."""

from dataclasses import dataclass

from outrider.errors import RequestError
from outrider.request import Speculation

__all__ = ["Drafting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What the engine's drafter offers."""

    num_draft_tokens: int  # per round at most; 0 = plain decoding
    drafter_context: int | None  # tokens of context behind which nothing is drafted; None = everywhere

    def check(self, wanted: Speculation) -> None:
        """Refuse more drafts than there are: a block with further rows would ruin all of its positions.

        Raises:
            RequestError: the message names both numbers.
        """
        if isinstance(wanted, int) and wanted > self.num_draft_tokens:
            raise RequestError(
                f"speculation={wanted} exceeds the {self.num_draft_tokens} drafts per round of this engine; lower it "
                "or use 'auto'"
            )

    def num_wanted(self, wanted: Speculation, num_known: int) -> int:
        """Drafts that a request asks for and the drafter can place behind so many tokens."""
        if wanted == "off" or (self.drafter_context is not None and num_known > self.drafter_context):
            return 0
        return self.num_draft_tokens if wanted == "auto" else wanted
