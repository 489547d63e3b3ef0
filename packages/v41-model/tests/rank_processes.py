"""Runs one of PROGRAMS as ranks in processes of their own: the other side of the tests of TorchDistributedWorld.

``python rank_processes.py DIRECTORY PROGRAM:TP:DP[:OPTION] ...`` imports torch once, then forks a process per rank of
every program. Each writes what its program gave to ``DIRECTORY/PROGRAM/rank-N.pt``, or the seconds it ran and its
error to ``rank-N.txt``; ``codes.txt`` has the exit codes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v41_config import ParallelLayout, V41Error
from v41_loader import open_checkpoint
from v41_model.collective_log import Site
from v41_model.communicator import Communicator
from v41_model.generation import Request, admit, advance
from v41_model.session import ModelSession
from v41_model.torch_distributed_world import TorchDistributedWorld
from v41_model.world import World

HERE = Site("here", 3)
PROMPTS = ((0, 17, 42, 9, 101, 7, 300), (0, 99), (0, 5, 6))
DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bool)


def partial(rank: int, rows: int = 8, width: int = 3) -> Tensor:
    """FP32 rows whose rank-order sum differs from others in the last bit."""
    return torch.rand((rows, width), generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 4)


def every_collective(comm: Communicator) -> dict[str, Any]:
    """One call of each, with empty exchanges and ranks; results by name."""
    ep = comm.ep_size
    sends = torch.tensor([(comm.rank * 3 + peer) % 4 for peer in range(ep)])
    receives = comm.exchange_counts(sends, HERE)
    n = int(sends.sum())
    ids = torch.repeat_interleave(torch.arange(ep, dtype=torch.int32), sends)
    columns = (torch.full((n, 5), float(comm.rank)).bfloat16(), torch.arange(n) + 0.5 + comm.rank, ids)
    none = torch.zeros(ep, dtype=torch.int64)
    bits = torch.arange(6, dtype=torch.uint8).view(2, 3) + comm.rank
    return {
        "reduced": comm.all_reduce(partial(comm.rank), HERE),
        "scattered": comm.reduce_scatter_tokens(partial(comm.rank), HERE),
        "gathered": [
            comm.all_gather_tokens(bits.repeat(1, 4).view(dtype), HERE).view(torch.uint8) for dtype in DTYPES
        ],
        "empty": comm.all_gather_tokens(torch.zeros(0, 4), HERE),
        "logits": comm.gather_logits(partial(comm.rank, 2), HERE),
        "counts": receives,
        "rows": comm.exchange_rows(columns, sends, receives, HERE),
        "nothing": comm.exchange_rows((torch.zeros(0, 7),), none, none, HERE),
        "log": [(str(r.kind), str(r.site), r.sent, r.received, r.bytes_sent, r.bytes_received)
                for r in comm.log.records],
    }  # fmt: skip


def collectives(world: World) -> Any:
    return world.run(every_collective)


def axes(world: TorchDistributedWorld) -> Any:
    """The DeviceMesh axes, and this rank's place on them."""
    names = [*(world.mesh.mesh_dim_names or ()), *(world.ep_mesh.mesh_dim_names or ())]
    places = [world.mesh.get_local_rank("dp"), world.mesh.get_local_rank("tp"), world.ep_mesh.get_local_rank()]
    sizes = [world.mesh["dp"].size(), world.mesh["tp"].size(), world.ep_mesh.size()]
    return [names, places, sizes]


def raising(world: World) -> Any:
    """Rank 1 raises while the others wait for it."""

    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("no such expert")
        comm.all_reduce(torch.zeros(2), HERE)

    return world.run(program)


def killed(world: World, victim: int = 1) -> Any:
    """One rank's process ends without a word, inside a collective of the others."""

    def program(comm: Communicator) -> None:
        comm.all_reduce(torch.zeros(2), HERE)
        if comm.rank == victim:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.exchange_counts(torch.zeros(comm.ep_size, dtype=torch.int64), HERE)

    return world.run(program)


def killed_store(world: World) -> Any:
    return killed(world, victim=0)


def late(world: World) -> Any:
    """Rank 1 computes for longer than the timeout."""

    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(4)
        comm.all_reduce(torch.zeros(2), HERE)

    return world.run(program)


def mismatch(world: World) -> Any:
    """Rank 1 stands at another collective."""

    def program(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.all_gather_tokens(torch.zeros(2), HERE)
        comm.all_reduce(torch.zeros(2), HERE)

    return world.run(program)


def finished(world: World) -> Any:
    """Rank 1 is done while the others still call."""

    def program(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.all_reduce(torch.zeros(2), HERE)

    return world.run(program)


def wrong_counts(world: World) -> Any:
    def program(comm: Communicator) -> None:
        counts = torch.ones(comm.ep_size, dtype=torch.int64)
        comm.exchange_rows((torch.zeros(comm.ep_size, 1),), counts, counts + (comm.rank == 1), HERE)

    return world.run(program)


def strange_result(world: World) -> Any:
    return world.run(lambda comm: ParallelLayout())


def failing_outside(world: World) -> Any:
    """Rank 1 fails between two runs, where no collective is."""
    world.run(lambda comm: None)
    if 1 in world.local_ranks:
        raise V41Error("checkpoint", "nothing", "a file")
    return world.run(lambda comm: comm.all_reduce(torch.zeros(2), HERE))


def model(world: World, checkpoint: str) -> Any:
    """Three greedy steps of ragged requests, everything captured."""
    with open_checkpoint(checkpoint) as opened:
        session = ModelSession.open(opened, world.layout, world)
    requests = [Request(prompt, 3) for prompt in PROMPTS]
    groups = admit(session, requests)
    steps = []
    while any(group.running for group in groups):
        for step in advance(session, groups, capture=True):
            steps.append(([c.tensors for c in step.output.captures], step.output.logits))
    return {"steps": steps, "generated": [request.generated for request in requests]}


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (collectives, raising, killed, killed_store, late, mismatch, finished, wrong_counts, strange_result)
} | {"axes": axes, "failing_outside": failing_outside, "model": model}  # fmt: skip


TIMEOUTS = {"late": 2.0}
"""Seconds a rank waits in a collective; 60 for all others."""


OVER_TCP = ("raising", "killed_store")
"""Programs whose store is kept by rank 0; that of the others is a file."""


def _rendezvous(program: str, directory: Path) -> str:
    if program not in OVER_TCP:
        return (directory / "rendezvous").as_uri()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def _rank(
    program: str, layout: ParallelLayout, rank: int, directory: Path, rendezvous: str, options: list[str]
) -> None:
    began = time.monotonic()
    try:
        with TorchDistributedWorld(
            layout,
            init_method=rendezvous,
            rank=rank,
            world_size=layout.world_size,
            timeout=TIMEOUTS.get(program, 60.0),
        ) as world:
            result = PROGRAMS[program](world, *options)
            torch.save(result, directory / f"rank-{rank}.pt")
    except V41Error as error:
        seconds = time.monotonic() - began
        (directory / f"rank-{rank}.txt").write_text(f"{seconds:.1f}\n{type(error).__name__}: {error}")


def _start(directory: Path, job: str) -> list[int]:
    """Fork the ranks of ``PROGRAM:TP:DP[:OPTION]``, whose files go to ``directory/PROGRAM``; their process ids."""
    program, tp, dp, *options = job.split(":")
    layout = ParallelLayout(int(tp), int(dp))
    (directory / program).mkdir()
    rendezvous = _rendezvous(program, directory / program)
    children = []
    for rank in range(layout.world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(program, layout, rank, directory / program, rendezvous, options)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return children


def main(directory: str, *jobs: str) -> None:
    torch.set_num_threads(1)
    started = {job: _start(Path(directory), job) for job in jobs}
    for job, children in started.items():
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (Path(directory) / job.split(":")[0] / "codes.txt").write_text(" ".join(map(str, codes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
