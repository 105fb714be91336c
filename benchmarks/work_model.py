"""The text adapter for the peers' work: EOS is never sampled and nothing else ends a reply, so its length is fixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core.models.text import TextAdapter

if TYPE_CHECKING:
    from relax_core.media import MediaStore
    from relax_core.models.config import TextConfig


class WorkAdapter(TextAdapter):
    """The peers ban EOS alone: padding and the unknown word may be sampled."""

    def __init__(self, config: TextConfig, media: MediaStore, seed: int = 0) -> None:
        super().__init__(config, media, seed)
        self.banned_token_ids = tuple(sorted(self.stop_ids))
        self.stop_ids = frozenset()
