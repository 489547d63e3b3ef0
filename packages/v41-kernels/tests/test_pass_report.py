"""Reading the verifier's report: agreement is counted, everything else is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41_kernels import PassCheck, PassVerificationError
from v41_kernels.pass_report import read_pass_report

HEADER = "funcID,passName,referPassName,verifyType,loopInfo,ioflag,verifyResult,rtol,atol,maxAbsDiff\n"
AGAINST_STAND_IN = "1,tensor_graph,golden,t,i=0,output3,FAILED,0.0,0.0,7.0\n"


def write_report(directory: Path, rows: str, exceptions: str = "") -> Path:
    (directory / "verify_result_brief.csv").write_text(HEADER + AGAINST_STAND_IN + rows)
    (directory / "verify_exception.log").write_text(exceptions)
    return directory


def row(pass_name: str, verdict: str, difference: str = "0.0") -> str:
    return f"2,{pass_name},tensor_graph,t,i=0,output3,{verdict},0.0078125,0.0,{difference}\n"


def test_agreement_is_counted_in_pass_order(tmp_path: Path) -> None:
    rows = row("Pass_14_SplitK", "PASS") + row("Pass_04_ExpandFunction", "PASS") * 2
    assert read_pass_report("k", write_report(tmp_path, rows)) == (
        PassCheck("ExpandFunction", 2),
        PassCheck("SplitK", 1),
    )


def test_nothing_ran(tmp_path: Path) -> None:
    assert read_pass_report("k", write_report(tmp_path, "", "tensor_graph Verify for 4\n")) == ()


@pytest.mark.parametrize("verdict", ["FAILED", "NO_COMPARE", ""])
def test_any_other_verdict_is_an_error(verdict: str, tmp_path: Path) -> None:
    rows = row("Pass_04_ExpandFunction", "PASS") + row("Pass_14_SplitK", verdict, "3.5")
    with pytest.raises(PassVerificationError, match=r"after Pass_14_SplitK, maximal difference 3\.5") as caught:
        read_pass_report("kernel k", write_report(tmp_path, rows))
    assert caught.value.where == "kernel k, output3"


def test_a_row_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PassVerificationError):
        read_pass_report("k", write_report(tmp_path, "2,Pass_14_SplitK,tensor_graph,t"))


def test_a_graph_that_cannot_be_interpreted_is_an_error(tmp_path: Path) -> None:
    written = write_report(tmp_path, "", "[VERIFY] Pass_28_InferParamIndex, f, i=8, WHERE_ST\nErrcode: FB1002!\n")
    with pytest.raises(PassVerificationError, match="Pass_28_InferParamIndex"):
        read_pass_report("k", written)
