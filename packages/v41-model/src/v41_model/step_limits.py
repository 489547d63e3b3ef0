"""What one step of a DP group may hold: the service capacity contract (docs/serving.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from v41_model.errors import RequestError
from v41_model.integer_checks import checked_integer
from v41_model.step_batch import StepBatch

__all__ = ["StepLimits"]

MOST = {"sequences": 1024, "prefill_rows": 1 << 20, "decode_rows_per_request": 256}
"""What a session lets itself be asked for: it keeps tables of pages for each sequence."""


@dataclass(frozen=True)
class StepLimits:
    """Sequences, prefill rows and decode rows of a DP group in one step.

    A request that has tokens stored and runs at most ``decode_rows_per_request`` rows decodes: one target row and the
    drafts that come with it. All other rows are prefill rows.

    Errors: :class:`RequestError` for a number that is no integer from 1 to its end in ``MOST``.
    """

    sequences: int = 32
    prefill_rows: int = 4096
    decode_rows_per_request: int = 6

    def __post_init__(self) -> None:
        for name, end in MOST.items():
            checked_integer(f"StepLimits.{name}", getattr(self, name), 1, end)

    @property
    def decode_rows(self) -> int:
        """Rows when all sequences decode: 192 unless something else was asked for."""
        return self.sequences * self.decode_rows_per_request

    def check(self, where: str, batch: StepBatch) -> None:
        """Errors: :class:`RequestError` saying which number a batch exceeds. A request without rows counts too."""
        requests = len(batch.query_start_loc) - 1
        if requests > self.sequences:
            raise RequestError(where, f"{requests} sequences", f"at most {self.sequences}")
        rows = np.diff(batch.query_start_loc)
        decodes = (np.asarray(batch.kv_seq_lens) > 0) & (rows <= self.decode_rows_per_request)
        prefill_rows = int(rows[~decodes].sum())
        if prefill_rows > self.prefill_rows:
            raise RequestError(where, f"{prefill_rows} prefill rows", f"at most {self.prefill_rows}")
