"""DeepSeek-V4.1-Flash: sequence-parallel forward, serving session, generation and conformance commands."""

from v41_model.collective_log import CollectiveKind, CollectiveLog, CollectiveRecord, Site
from v41_model.communicator import Communicator, ExpertCommunicator, TokenCommunicator
from v41_model.errors import (
    OutputError,
    PoolError,
    RankError,
    RequestError,
    SessionError,
    WorldError,
)
from v41_model.generation import Request, RequestGroup, admit, advance, generate
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators
from v41_model.page_allocator import PageAllocator, blocks_for_requests
from v41_model.rank_forward import RankModel
from v41_model.session import GroupOutput, ModelSession
from v41_model.step_batch import StepBatch

__all__ = [
    "CollectiveKind",
    "CollectiveLog",
    "CollectiveRecord",
    "Communicator",
    "ExpertCommunicator",
    "GroupOutput",
    "LocalWorld",
    "ModelSession",
    "Operators",
    "OutputError",
    "PageAllocator",
    "PoolError",
    "RankError",
    "RankModel",
    "Request",
    "RequestError",
    "RequestGroup",
    "SessionError",
    "Site",
    "StepBatch",
    "TokenCommunicator",
    "WorldError",
    "admit",
    "advance",
    "blocks_for_requests",
    "generate",
]
