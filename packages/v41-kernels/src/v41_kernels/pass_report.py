"""The verifier's report on the values that a kernel gives after compiler passes.

The verifier raises nothing when values differ, and when a lowered graph cannot be interpreted it writes that to a
file and goes on. Both are read here and become errors.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from v41_kernels.errors import PassVerificationError

_SUMMARY = "verify_result_brief.csv"
_EXCEPTIONS = "verify_exception.log"


@dataclass(frozen=True)
class PassCheck:
    """After `pass_name`, `compared` destinations (per tile loop trip) had the tensor graph's values."""

    pass_name: str
    compared: int


def read_pass_report(where: str, directory: Path) -> tuple[PassCheck, ...]:
    """The checks in a verifier's directory, in the order of the passes.

    Errors: `PassVerificationError` if values differ after a pass, or the graph could not be interpreted after it.
    """
    for line in (directory / _EXCEPTIONS).read_text(errors="replace").splitlines():
        if line.startswith("[VERIFY]"):
            expected = "a graph that can be interpreted after every checked pass"
            raise PassVerificationError(where, line.removeprefix("[VERIFY]").strip(), expected)
    compared: Counter[str] = Counter()
    with open(directory / _SUMMARY, newline="") as file:
        for row in csv.DictReader(file):
            if row["referPassName"] == "golden":  # against the stand-in that makes the verifier write its values
                continue
            # "Pass_04_ExpandFunction": the number orders the passes, the name is what one knows them by.
            name = row["passName"]
            if row["verifyResult"] != "PASS":
                found = f"{row['verifyResult']} after {name}, maximal difference {row['maxAbsDiff']}"
                expected = f"the tensor graph's values within {row['rtol']} relatively"
                raise PassVerificationError(f"{where}, {row['ioflag']}", found, expected)
            compared[name] += 1
    return tuple(PassCheck(name.split("_", 2)[-1], compared[name]) for name in sorted(compared))
