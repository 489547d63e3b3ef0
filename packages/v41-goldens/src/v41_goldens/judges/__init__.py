"""Judges: whether a result may count as this model's, with a typed verdict and a typed error.

`judge_*` returns a verdict, with the statistics and every reason against; `assert_*` raises `JudgementError` with
them. Nothing that is not finite is accepted, but by the judges that compare bytes; and no row can hide behind others.
"""

from v41_goldens.errors import JudgementError
from v41_goldens.judges.candidate_mask import (
    CandidateMaskVerdict,
    assert_candidate_blocks,
    assert_candidate_mask,
    judge_candidate_blocks,
    judge_candidate_mask,
)
from v41_goldens.judges.cutoff import BY_INDEX, CutoffRule
from v41_goldens.judges.equal_bits import EqualBitsVerdict, assert_equal_bits, judge_equal_bits, unequal_bits
from v41_goldens.judges.inactive_rows import (
    InactiveRowsVerdict,
    assert_untouched_rows,
    assert_zero_rows,
    assert_zero_shards,
    judge_untouched_rows,
    judge_zero_rows,
    judge_zero_shards,
)
from v41_goldens.judges.relative_budget import (
    RELATIVE_BUDGET,
    RelativeBudget,
    RelativeBudgetVerdict,
    assert_relative_budget,
    judge_relative_budget,
)
from v41_goldens.judges.row_bounds import ROW_BOUNDS, RowBounds, RowBoundsVerdict, assert_row_bounds, judge_row_bounds
from v41_goldens.judges.row_errors import ErrorStatistics
from v41_goldens.judges.selected_attention import (
    ANY_TIE,
    SelectedAttentionVerdict,
    assert_selected_attention,
    judge_selected_attention,
    rederive_attention,
    reference_index_scores,
)
from v41_goldens.judges.selection import (
    FOREIGN_ENTRY,
    SelectionVerdict,
    assert_selection,
    judge_selection,
    logical_entries,
)
from v41_goldens.judges.storage import (
    StorageVerdict,
    assert_storage,
    cache_tensors,
    judge_storage,
    owned_rows,
    storage_snapshot,
)
from v41_goldens.judges.verdict import Verdict

__all__ = [
    "ANY_TIE",
    "BY_INDEX",
    "FOREIGN_ENTRY",
    "RELATIVE_BUDGET",
    "ROW_BOUNDS",
    "CandidateMaskVerdict",
    "CutoffRule",
    "EqualBitsVerdict",
    "ErrorStatistics",
    "InactiveRowsVerdict",
    "JudgementError",
    "RelativeBudget",
    "RelativeBudgetVerdict",
    "RowBounds",
    "RowBoundsVerdict",
    "SelectedAttentionVerdict",
    "SelectionVerdict",
    "StorageVerdict",
    "Verdict",
    "assert_candidate_blocks",
    "assert_candidate_mask",
    "assert_equal_bits",
    "assert_relative_budget",
    "assert_row_bounds",
    "assert_selected_attention",
    "assert_selection",
    "assert_storage",
    "assert_untouched_rows",
    "assert_zero_rows",
    "assert_zero_shards",
    "cache_tensors",
    "judge_candidate_blocks",
    "judge_candidate_mask",
    "judge_equal_bits",
    "judge_relative_budget",
    "judge_row_bounds",
    "judge_selected_attention",
    "judge_selection",
    "judge_storage",
    "judge_untouched_rows",
    "judge_zero_rows",
    "judge_zero_shards",
    "logical_entries",
    "owned_rows",
    "rederive_attention",
    "reference_index_scores",
    "storage_snapshot",
    "unequal_bits",
]
