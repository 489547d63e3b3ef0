"""The demonstration's table comes from the run, and its checks notice what they are for."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from v41_config import TINY
from v41_loader import Checkpoint
from v41_model import demo
from v41_model.collective_log import CollectiveKind
from v41_model.demo import LAYOUT, SHOWN_LAYER, SHOWN_RANK
from v41_model.generation import GroupStep, admit, advance
from v41_model.layout_table import LayoutRow, OperatorTrace, format_layout_table
from v41_model.operators import Operators
from v41_model.session import ModelSession


@pytest.fixture(scope="module")
def example(tiny_checkpoint: Checkpoint) -> tuple[ModelSession, OperatorTrace, list[GroupStep]]:
    session = ModelSession.open(tiny_checkpoint, LAYOUT)
    trace = OperatorTrace(session.world)
    session.operators = trace.observe(Operators())
    return session, trace, advance(session, admit(session, demo.example_requests(1)), capture=True)


@pytest.fixture(scope="module")
def rows(example: tuple[ModelSession, OperatorTrace, list[GroupStep]]) -> dict[str, LayoutRow]:
    session, trace, steps = example
    return {row.step[3:]: row for row in demo.shown_rows(session, trace, steps)}


def test_the_shapes_are_those_of_the_eight_token_example(rows: dict[str, LayoutRow]) -> None:
    """Two rows of four streams on a rank, eight gathered, two heads of eight, partials back to two rows."""
    d = TINY.hidden_size
    assert (rows["TP AllGather"].takes, rows["TP AllGather"].gives) == (f"[2,{d}]", f"[8,{d}]")
    assert rows["Q projection, own heads"].gives == "[8,2,64]"
    assert rows["grouped output, partial"].gives == f"[8,{d}]"
    assert (rows["TP ReduceScatter (SUM)"].takes, rows["TP ReduceScatter (SUM)"].gives) == (f"[8,{d}]", f"[2,{d}]")
    assert rows["gate / top-k"].gives == "[2,16]; [2,4], [2,4]"
    assert rows["EP combine"].gives == rows["shared expert"].gives == f"[2,{d}]"
    assert rows["residual streams enter"].takes == rows["streams to the next layer"].gives == f"[2,4,{d}]"


def test_bytes_are_the_logs(rows: dict[str, LayoutRow]) -> None:
    d = TINY.hidden_size
    gather, scatter = rows["TP AllGather"].collective, rows["TP ReduceScatter (SUM)"].collective
    assert gather is not None
    assert scatter is not None
    assert (gather.kind, gather.bytes_sent, gather.bytes_received) == (CollectiveKind.TOKEN_ALL_GATHER, 4 * d, 16 * d)
    assert (scatter.bytes_sent, scatter.bytes_received) == (32 * d, 32 * d)
    table = format_layout_table(list(rows.values()))
    assert f"{32 * d:,}" in table
    assert len({len(line) for line in table.splitlines()}) == 1, "columns line up"


def test_tokens_and_routes_are_counted(
    example: tuple[ModelSession, OperatorTrace, list[GroupStep]], tiny_checkpoint: Checkpoint
) -> None:
    session, trace, steps = example
    table = tiny_checkpoint.tensor("embed.weight")
    requests = demo.example_requests(1)
    assert demo.check_unique_tokens(steps, table, requests) == []
    assert demo.check_routes(trace, session) == []


def test_doubled_or_lost_tokens_are_noticed(
    example: tuple[ModelSession, OperatorTrace, list[GroupStep]], tiny_checkpoint: Checkpoint
) -> None:
    _, _, steps = example
    table, requests = tiny_checkpoint.tensor("embed.weight"), demo.example_requests(1)
    first, second, *others = steps[0].output.captures
    for captures in ((first, first, *others), (first, *others)):
        output = dataclasses.replace(steps[0].output, captures=captures)
        wrong = [dataclasses.replace(steps[0], output=output), steps[1]]
        assert demo.check_unique_tokens(wrong, table, requests) != []
    assert second is not first


def test_replicas_in_dispatch_are_noticed(example: tuple[ModelSession, OperatorTrace, list[GroupStep]]) -> None:
    """Had every TP rank dispatched the group's tokens, the experts would have received four times the routes."""
    session, trace, _ = example
    doubled = OperatorTrace(session.world)
    for rank, calls in trace.calls.items():
        doubled.calls[rank] = [
            dataclasses.replace(c, arguments=((4 * c.arguments[0][0], *c.arguments[0][1:]), *c.arguments[1:]))
            if c.operator == "routed_experts"
            else c
            for c in calls
        ]
    failures = demo.check_routes(doubled, session)
    assert failures[0] == "layer 0: 256 routes instead of 64"


def test_a_wrong_residual_is_a_failure(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Checkpoint) -> None:
    """The generation half with one operator off by a last bit, on a short run."""
    golden = Operators()

    def wrong(y: torch.Tensor, x_hc: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        out = golden.mhc_post(y, x_hc, post, comb)
        out.view(torch.int16)[:1, 0, 0] ^= 1
        return out

    monkeypatch.setattr(demo, "NEW_TOKENS", 1)
    monkeypatch.setattr(demo, "LONG_PROMPT", 4)
    assert demo.generation(tiny_checkpoint) == []
    monkeypatch.setattr(demo, "Operators", lambda: golden.replace(mhc_post=wrong))
    assert demo.generation(tiny_checkpoint)[0] == "layer.00.hc_ffn_pre differs from the golden"


def test_pass_is_printed_only_without_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "layout_example", lambda checkpoint: [])
    for failures, code, word in (([], 0, "PASS"), (["layer.03.X differs"], 1, "FAIL")):
        monkeypatch.setattr(demo, "generation", lambda checkpoint, failures=failures: failures)
        assert demo.main() == code
        assert capsys.readouterr().out.splitlines()[-1].startswith(word)


def test_the_shown_layer_compresses_and_selects() -> None:
    assert TINY.layer_config(SHOWN_LAYER).owns_kv
    assert TINY.layer_config(SHOWN_LAYER).owns_index
    assert LAYOUT.tp_rank(SHOWN_RANK) == 1, "a rank whose two tokens belong to two requests"


def test_the_demonstration_says_what_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "v41_model.demo", "--help"], capture_output=True, text=True, check=True
    )
    assert "TINY on eight ranks" in done.stdout
    assert not done.stderr
