"""One rank per process, over torch.distributed: gloo on CPUs, nccl, hccl or another backend on devices.

Backends only move bytes: every payload travels as uint8, so that any dtype passes (float8 too), and sums are made
here, in rank order (:func:`~v41_model.communicator.sum_in_rank_order`), never by a backend's reduction. Before a
payload moves, the members tell each other which call they stand at and how many rows they bring; ranks that disagree
get an error instead of a hang. These notes, and the results that processes share, go over gloo even where payloads
go over a device's backend.
"""

from __future__ import annotations

import io
import os
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from v41_config import LayoutError, ParallelLayout
from v41_model.communicator import Communicator
from v41_model.errors import RankError, WorldError
from v41_model.rank_communicator import CollectiveCall, Moved, Parts, RankCommunicator
from v41_model.rank_watch import RankWatch

__all__ = ["TorchDistributedCommunicator", "TorchDistributedWorld"]

P = ParamSpec("P")
R = TypeVar("R")

BACKEND = "gloo"
TIMEOUT = 600.0
MAX_TIMEOUT = 1800.0
"""Seconds; after these gloo gives up by itself (nccl after ten minutes)."""

_POLL = timedelta(seconds=0.2)
_NOTE_BYTES = 256
_NUMBER_BYTES = 8


class TorchDistributedWorld:
    """This process's rank of ``layout``, and the way to the others.

    ``backend`` is a torch.distributed backend by name; ``device`` where its tensors live, by default the backend's
    device type with the index ``LOCAL_RANK`` that torchrun gives. ``init_method``, ``rank`` and ``world_size`` are as
    in ``torch.distributed.init_process_group``; by default all come from torchrun's environment. ``timeout`` is the
    longest a rank waits in one collective, in seconds, slower members included; ``silence`` how long a rank's process
    may give no sign of life before the others stop.

    A context manager: leaving it with an error tells the other ranks, leaving it in peace closes the connections.
    It owns torch.distributed's default process group.

    Errors: :class:`WorldError` for a backend that is not there, another number of processes than ranks, a timeout out
    of range, or ranks that do not show up in time.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        backend: str = BACKEND,
        *,
        device: torch.device | str | None = None,
        timeout: float = TIMEOUT,
        silence: float = 10.0,
        init_method: str = "env://",
        rank: int = -1,
        world_size: int = -1,
    ) -> None:
        for name, seconds in (("timeout", timeout), ("silence", silence)):
            if not 0 < seconds <= MAX_TIMEOUT:
                raise WorldError(f"TorchDistributedWorld {name}", seconds, f"0 < seconds <= {MAX_TIMEOUT:.0f}")
        if not distributed.is_available() or not distributed.is_backend_available(backend):
            raise WorldError("TorchDistributedWorld backend", backend, "a torch.distributed backend of this machine")
        if distributed.is_initialized():
            raise WorldError("TorchDistributedWorld", "a default process group", "the only one in this process")
        self.layout = layout
        self.timeout = timeout
        self.device = torch.device(device) if device is not None else _default_device(backend)
        self._failure: WorldError | None = None
        store = self._join(backend, init_method, rank, world_size)
        self.rank = distributed.get_rank()
        self.current_rank: int | None = None
        keeper = None if init_method.startswith("file:") or distributed.is_torchelastic_launched() else 0
        self._watch = RankWatch(store, self.rank, layout.world_size, silence=silence, store_rank=keeper)
        try:
            self._connect(backend)
            self._watch.start(timeout)
        except RuntimeError as error:
            distributed.destroy_process_group()
            raise WorldError("TorchDistributedWorld", str(error), f"all ranks within {timeout} s") from error
        self.communicators = [TorchDistributedCommunicator(self)]

    def _connect(self, backend: str) -> None:
        """Make the groups. Every rank does so in the same order."""
        layout = self.layout
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
        """Axes dp and tp; the axis ep is ``ep_mesh``."""
        self.ep_mesh: DeviceMesh = init_device_mesh(self.device.type, (layout.ep,), mesh_dim_names=("ep",))
        self._payload_groups = {
            layout.tp_group(self.rank): self.mesh.get_group("tp"),
            range(layout.ep): self.ep_mesh.get_group("ep"),
        }
        self._note_groups = self._payload_groups if backend == "gloo" else self._gloo_groups()

    @property
    def local_ranks(self) -> range:
        """The rank that lives in this process."""
        return range(self.rank, self.rank + 1)

    def run(
        self, rank_program: Callable[Concatenate[Communicator, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run this process's rank of ``rank_program``, as :meth:`v41_model.world.World.run` says.

        Returns the results of all ranks in rank order. They are shared as ``torch.save`` writes them and read as
        ``torch.load`` does with ``weights_only``: tensors, numbers, text, None and containers of these.

        Errors: :class:`RankError` with the rank that failed first, in whichever process; it, or what a collective
        raised, ends the world: every later call raises it again.
        """
        if self.current_rank is not None:
            raise WorldError("TorchDistributedWorld.run", "a call from inside its own rank", "one run at a time")
        if self._failure is not None:
            raise self._failure
        self.current_rank = self.rank
        try:
            with torch.inference_mode():
                result = rank_program(self.communicators[0], *args, **kwargs)
                return self._share(result)
        except BaseException as error:
            if self._failure is not None:  # found in a collective: the others know, or stand in the same one
                raise self._failure from (error if error is not self._failure else error.__cause__)
            self._failure = self._watch.report(self.rank, error)
            if not isinstance(error, Exception | SystemExit):
                raise
            raise self._failure from error
        finally:
            self.current_rank = None

    def close(self, error: BaseException | None = None) -> None:
        """Leave the world: with ``error`` the other ranks are told and stop, without one they go on."""
        if not distributed.is_initialized():
            return
        if error is not None and self._failure is None:
            self._failure = self._watch.report(self.rank, error)
        self._watch.leave(self.timeout)
        if self._failure is None:
            distributed.destroy_process_group()
            return
        for group in {id(g): g for g in (*self._payload_groups.values(), *self._note_groups.values())}.values():
            if hasattr(group, "abort"):
                with suppress(RuntimeError):
                    group.abort()
        with suppress(RuntimeError):
            distributed.destroy_process_group()

    def __enter__(self) -> TorchDistributedWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def meet(self, call: CollectiveCall) -> None:
        """Wait until every member of the group stands at the same call.

        Errors: :class:`WorldError` when one stands at another call or brings other numbers of rows, or does not
        arrive in time; :class:`RankError` when one failed.
        """
        if call.counts is None:
            self._agree(call.group, str(call), [0] * len(call.group))
            return
        announced = self._agree(call.group, str(call), call.counts.send)
        try:
            call.require_announced(self.rank, announced)
        except WorldError as error:
            raise self._failed(error) from None

    def _agree(self, group: range, call: str, counts: Sequence[int]) -> tuple[int, ...]:
        """Tell every member where this rank stands, and a number for each; the members' numbers for this rank."""
        note = _note(call)
        numbers = torch.tensor(counts, dtype=torch.int64).view(-1, 1).view(torch.uint8)
        outgoing = torch.cat((note.expand(len(group), -1), numbers), dim=1)
        incoming = torch.empty_like(outgoing)
        notes_group = self._note_groups[group]
        self._wait(distributed.all_to_all_single(incoming, outgoing, group=notes_group, async_op=True), call)
        notes, announced = incoming.split((_NOTE_BYTES, _NUMBER_BYTES), dim=1)
        for place in (notes != note).any(dim=1).nonzero().flatten().tolist():
            theirs = bytes(notes[place].tolist()).rstrip(b"\0").decode(errors="replace")
            expected = f"all members of the group where rank {self.rank} is: {call}"
            raise self._failed(WorldError("collective", f"rank {group[place]} in {theirs}", expected))
        return tuple(announced.contiguous().view(torch.int64).flatten().tolist())

    def gather(self, call: CollectiveCall) -> Parts:
        """Every member's column."""
        (column,) = call.columns
        sent = _as_bytes(self._on_device(column, call)).flatten()
        received = sent.new_empty((len(call.group), sent.numel()))
        group = self._payload_groups[call.group]
        self._wait(distributed.all_gather(list(received), sent, group, async_op=True), str(call))
        whole = received.flatten().view(column.dtype).view(len(call.group), *column.shape)
        return [(part,) for part in whole]

    def exchange(self, call: CollectiveCall) -> Parts:
        """Each member's rows for this rank, in exact sizes."""
        assert call.counts is not None
        packed = [_row_bytes(self._on_device(column, call)) for column in call.columns]
        sent = packed[0] if len(packed) == 1 else torch.cat(packed, dim=1)
        sends, receives = list(call.counts.send), list(call.counts.receive)
        received = sent.new_empty((sum(receives), sent.shape[1]))
        group = self._payload_groups[call.group]
        work = distributed.all_to_all_single(received, sent, receives, sends, group=group, async_op=True)
        self._wait(work, str(call))
        columns = []
        for rows, column in zip(received.split([p.shape[1] for p in packed], dim=1), call.columns, strict=True):
            aligned = rows if len(packed) == 1 else rows.clone(memory_format=torch.contiguous_format)
            columns.append(aligned.view(column.dtype).view(len(rows), *column.shape[1:]).split(receives))
        return list(zip(*columns, strict=True))

    def _on_device(self, column: Tensor, call: CollectiveCall) -> Tensor:
        if column.device.type != self.device.type:
            raise WorldError(str(call), f"a tensor on {column.device}", f"tensors on {self.device}")
        return column

    def _wait(self, work: distributed.Work | None, call: str) -> None:
        """Wait for an operation of the backend, looking at the other ranks meanwhile."""
        assert work is not None
        deadline = time.monotonic() + self.timeout
        while not work.is_completed():
            failure = self._watch.failure
            if failure is not None:
                raise self._failed(failure)
            if time.monotonic() > deadline:
                found = f"no answer within {self.timeout} s; rank {self.rank} waits in {call}"
                raise self._failed(WorldError("collective", found, "every member of the group to arrive"))
            if self.device.type == "cpu":
                with suppress(RuntimeError):  # raised when the time is up, and for an error that is raised again below
                    work.wait(_POLL)
            else:
                time.sleep(1e-4)  # a device's backend would take the end of a timed wait for a failure
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(self._watch.explain(error)) from error

    def _failed(self, error: WorldError) -> WorldError:
        self._failure = error
        if not isinstance(error, RankError):
            self._watch.report(self.rank, error)
        return error

    def _share(self, result: R) -> list[R]:
        """Every rank's result, in rank order."""
        world = self.layout.world_size
        if world == 1:
            return [result]
        buffer = io.BytesIO()
        torch.save(result, buffer)
        own = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        group, where = range(world), "the end of its program"
        lengths = self._agree(group, where, [len(own)] * world)
        padded = own.new_zeros(max(lengths))
        padded[: len(own)] = own
        received = padded.new_empty((world, len(padded)))
        self._wait(distributed.all_gather(list(received), padded, self._note_groups[group], async_op=True), where)
        shared = [row[:length] for row, length in zip(received, lengths, strict=True)]
        try:
            return [result if rank == self.rank else _loaded(text) for rank, text in enumerate(shared)]
        except pickle.UnpicklingError as error:
            expected = "tensors, numbers, text, None and containers of these, which every process can read"
            raise WorldError("result of the ranks' program", type(result).__name__, expected) from error

    def _gloo_groups(self) -> dict[range, distributed.ProcessGroup]:
        """The same groups over gloo. Every rank makes all of them: that is how torch.distributed wants it."""
        world, timeout = range(self.layout.ep), timedelta(seconds=MAX_TIMEOUT)
        tp_groups = [self.layout.tp_group(start) for start in world[:: self.layout.tp]]
        made = {group: distributed.new_group(list(group), timeout, backend="gloo") for group in (*tp_groups, world)}
        return {group: made[group] for group in self._payload_groups}

    def _join(self, backend: str, init_method: str, rank: int, world_size: int) -> Store:
        """The rendezvous: the store, after the default process group stands."""
        timeout = timedelta(seconds=self.timeout)
        try:
            meeting = rendezvous(init_method, rank, world_size, timeout=timeout)
            store, rank, world_size = next(meeting)
        except (RuntimeError, ValueError) as error:
            raise WorldError("TorchDistributedWorld", str(error), "the other ranks, as torchrun tells") from error
        if world_size != self.layout.world_size:
            raise LayoutError("processes", world_size, f"one for each of tp * dp = {self.layout.world_size} ranks")
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index or 0)
        try:
            distributed.init_process_group(
                backend,
                store=PrefixStore("groups", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=MAX_TIMEOUT),
            )
        except (RuntimeError, ValueError) as error:
            raise WorldError("TorchDistributedWorld", str(error), f"all ranks within {self.timeout} s") from error
        return PrefixStore("ranks", store)


class TorchDistributedCommunicator(RankCommunicator):
    """The :class:`~v41_model.communicator.Communicator` of the rank in this process."""

    def __init__(self, world: TorchDistributedWorld) -> None:
        super().__init__(world.layout, world.rank)
        self._world = world

    def _move(self, call: CollectiveCall, finish: Callable[[Parts], tuple[Tensor, ...]]) -> Moved:
        if self._world.current_rank is None:
            raise WorldError(f"rank {self.rank}", f"{call} outside of run", "collectives only in a run")
        alone = len(call.group) == 1
        if not alone:
            self._world.meet(call)
        began = time.perf_counter()
        if alone:
            if call.counts is not None:
                call.require_announced(self.rank, call.counts.send)
            parts: Parts = [call.columns]
        else:
            parts = self._world.gather(call) if call.counts is None else self._world.exchange(call)
        received = sum(t.nbytes for part in parts for t in part)
        results = finish(parts)
        if self._world.device.type != "cpu":
            torch.accelerator.synchronize()
        return Moved(results, received, time.perf_counter() - began)


def _note(call: str) -> Tensor:
    """UINT8 ``[_NOTE_BYTES]``: the text; where it is too long, its end gives way to a digest of all."""
    text = call.encode()
    if len(text) > _NOTE_BYTES:
        digest = f"... {zlib.crc32(text):08x}".encode()
        text = text[: _NOTE_BYTES - len(digest)] + digest
    return torch.frombuffer(bytearray(text.ljust(_NOTE_BYTES, b"\0")), dtype=torch.uint8)


def _loaded(text: Tensor) -> Any:
    return torch.load(io.BytesIO(text.numpy().tobytes()), weights_only=True, map_location="cpu")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _row_bytes(column: Tensor) -> Tensor:
    """UINT8 ``[R, bytes of a row]`` of ``[R, ...]``, R may be 0."""
    return column.contiguous().view(len(column), prod(column.shape[1:])).view(torch.uint8)


def _default_device(backend: str) -> torch.device:
    for kind, name in distributed.Backend.default_device_backend_map.items():
        if name == backend:
            return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    raise WorldError("TorchDistributedWorld device", None, f"a device for the backend {backend}")
