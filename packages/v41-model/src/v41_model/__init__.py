"""DeepSeek-V4.1-Flash: sequence-parallel forward, serving session, generation and conformance commands."""

from v41_model.cache_budget import CacheBudget
from v41_model.collective_log import CollectiveKind, CollectiveLog, CollectiveRecord, Site
from v41_model.communicator import Communicator, ExpertCommunicator, TokenCommunicator
from v41_model.errors import (
    OutputError,
    PoolError,
    ProviderError,
    RankError,
    RequestError,
    SessionError,
    TextError,
    WorldError,
)
from v41_model.generation import NewToken, Request, RequestGroup, admit, advance, generate, stream
from v41_model.local_world import LocalWorld
from v41_model.operator_provider import OperatorProvider
from v41_model.operators import Operators
from v41_model.page_allocator import PageAllocator
from v41_model.rank_forward import RankModel
from v41_model.sampling import Sampling, choose_tokens
from v41_model.session import GroupOutput, ModelSession
from v41_model.step_batch import StepBatch
from v41_model.step_limits import StepLimits
from v41_model.swap import Swap
from v41_model.text_codec import TextCodec, TextStream
from v41_model.torch_distributed_world import TorchDistributedWorld
from v41_model.wiring import Wiring
from v41_model.world import World

__all__ = [
    "CacheBudget",
    "CollectiveKind",
    "CollectiveLog",
    "CollectiveRecord",
    "Communicator",
    "ExpertCommunicator",
    "GroupOutput",
    "LocalWorld",
    "ModelSession",
    "NewToken",
    "OperatorProvider",
    "Operators",
    "OutputError",
    "PageAllocator",
    "PoolError",
    "ProviderError",
    "RankError",
    "RankModel",
    "Request",
    "RequestError",
    "RequestGroup",
    "Sampling",
    "SessionError",
    "Site",
    "StepBatch",
    "StepLimits",
    "Swap",
    "TextCodec",
    "TextError",
    "TextStream",
    "TokenCommunicator",
    "TorchDistributedWorld",
    "Wiring",
    "World",
    "WorldError",
    "admit",
    "advance",
    "choose_tokens",
    "generate",
    "stream",
]
