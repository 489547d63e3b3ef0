"""The communication account: bytes measured in runs equal the formula of shapes, and the formula the contract's."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from v41_config import FLASH, TINY, ModelConfig, ParallelLayout, TokenMapping
from v41_loader import Checkpoint
from v41_model.cli import main
from v41_model.local_world import LocalWorld
from v41_model.traffic_account import site_accounts
from v41_model.traffic_formula import expected_traffic, half_layer_bytes
from v41_model.traffic_run import STEPS, MeasuredStep, StepShape, TrafficModel, flash_at_two_layers, measure_step
from v41_model.wiring import Wiring

TP4_DP2 = ParallelLayout(4, 2)


def _measured(model: TrafficModel, layout: ParallelLayout, shape: StepShape, wiring: Wiring) -> MeasuredStep:
    return measure_step(LocalWorld(layout), model, shape, wiring)


def _transport(config: ModelConfig, layout: ParallelLayout) -> TrafficModel:
    return TrafficModel.transport(config, layout, range(layout.world_size))


def test_the_formula_is_the_contracts() -> None:
    """T = 192, D = 5120, TP4: D * (2 * T_local + 10 * T) = 10.3 MB against D * 20 * T = 19.7 MB."""
    mapping = TokenMapping(TP4_DP2, 0, 192, 192)
    sharded, replicated = (half_layer_bytes(FLASH, mapping, 0, w) for w in (Wiring.SHARDED, Wiring.REPLICATED))
    assert sharded == 5120 * (2 * 48 + 10 * 192) == 10_321_920
    assert replicated == 5120 * 20 * 192 == 19_660_800


@pytest.mark.parametrize("wiring", Wiring)
def test_flash_decode_of_192_rows_moves_what_the_formula_says(wiring: Wiring) -> None:
    """Transport alone, at FLASH's dimensions: every call of every rank, and the half-layer's megabytes."""
    config = flash_at_two_layers()
    assert (config.hidden_size, config.n_routed_experts, config.vocab_size) == (5120, 384, 129280)
    model = _transport(config, TP4_DP2)
    step = _measured(model, TP4_DP2, replace(STEPS["decode-192"], all_logits=False), wiring)
    accounts = {account.site: account for account in site_accounts(model, step)}
    assert all(account.agrees for account in accounts.values())
    boundary = (
        sum(accounts[site].most.bytes for site in ("attention input", "attention output") if site in accounts)
        // config.num_hidden_layers
    )
    assert boundary == {Wiring.SHARDED: 10_321_920, Wiring.REPLICATED: 19_660_800}[wiring]
    assert sum(map(sum, (rank.received_routes for rank in step.ranks))) == 2 * 192 * 6 * config.num_hidden_layers


@pytest.mark.parametrize("wiring", Wiring)
@pytest.mark.parametrize("layout", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("shape", [StepShape(1, 1, 5), StepShape(3, 7, 0), StepShape(2, 1, 0, True)], ids=str)
def test_a_whole_model_moves_what_the_formula_says(
    tiny_checkpoint: Checkpoint, layout: tuple[int, int], shape: StepShape, wiring: Wiring
) -> None:
    """T below TP and indivisible T included."""
    ranks = ParallelLayout(*layout)
    model = TrafficModel.open(tiny_checkpoint, ranks, range(ranks.world_size))
    step = _measured(model, ranks, shape, wiring)
    accounts = site_accounts(model, step)
    assert [a.site for a in accounts if not a.agrees] == []
    called = {a.site for a in accounts}
    assert called >= {"attention output", "expert dispatch", "expert combine", "logits"}
    assert ("embedding" in called) is (ranks.tp > 1), "one rank of a group holds the whole table"
    assert all(record.seconds > 0 for rank in step.ranks for record in rank.records)


def test_transport_alone_moves_what_the_whole_model_moves(tiny_checkpoint: Checkpoint) -> None:
    """But for the routes, which come from a random gate: their number is the same, not where they go."""
    whole = TrafficModel.open(tiny_checkpoint, TP4_DP2, range(8))
    for wiring in Wiring:
        steps = [_measured(m, TP4_DP2, StepShape(3, 2, 0), wiring) for m in (whole, _transport(TINY, TP4_DP2))]
        calls = [[(r.kind, r.site, r.sent) for rank in s.ranks for r in rank.records if r.site.step != "expert combine"]
                 for s in steps]  # fmt: skip
        assert calls[0] == calls[1]


def test_an_account_that_does_not_agree_is_seen() -> None:
    """One byte too many in one call, and a call that is missing."""
    model = _transport(TINY, TP4_DP2)
    step = _measured(model, TP4_DP2, StepShape(2, 3, 0), Wiring.SHARDED)
    assert all(account.agrees for account in site_accounts(model, step))
    first, *others = step.ranks
    record = first.records[3]
    wrong = replace(record, bytes_sent=record.bytes_sent + 1)
    for records in ((*first.records[:3], wrong, *first.records[4:]), (*first.records[:3], *first.records[4:])):
        changed = replace(step, ranks=(replace(first, records=records), *others))
        assert [a.site for a in site_accounts(model, changed) if not a.agrees] == [record.site.step]
    as_other = replace(step, wiring=Wiring.REPLICATED)
    assert {a.site for a in site_accounts(model, as_other) if not a.agrees} == {
        "embedding", "attention input", "attention output", "MoE output", "final hidden"
    }  # fmt: skip


def test_the_sharded_wiring_moves_less_at_every_step() -> None:
    """The TP traffic of a layer, MoE's way back to replicated rows included."""
    for shape in STEPS.values():
        mapping = TokenMapping(TP4_DP2, 0, shape.group_rows, shape.group_rows)
        sums = []
        for wiring in Wiring:
            sites = expected_traffic(FLASH, mapping, 0, wiring, logit_rows=0, received_routes=0)
            layer = ("attention input", "attention output", "MoE output")
            sums.append(sum(sites[site].bytes for site in layer if site in sites))
        replicated, sharded = sums
        assert sharded < 0.6 * replicated


def test_the_command_prints_and_writes_the_account(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_directory: Path
) -> None:
    path = tmp_path / "records.csv"
    options = ["--checkpoint", str(tiny_directory), "--tp", "2", "--dp", "2", "--steps", "small-decode"]
    assert main(["traffic", *options, "--threads", "1", "--records", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "say nothing about a device" in printed
    assert printed.rstrip().endswith("measured bytes equal the formula")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["rank"] for row in rows} == {"0", "1", "2", "3"}
    assert {row["wiring"] for row in rows} == {"sharded", "replicated"}
    layers = {row["layer"] for row in rows if row["site"] == "attention output"}
    assert layers == {str(layer) for layer in range(TINY.num_hidden_layers)}
