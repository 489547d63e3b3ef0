"""What can be wrong with a checkpoint: one error type per invariant, so that a caller can tell them apart.

All are `V41Error`s: `where` names the tensor and the file, `found` and `expected` say what differs.
"""

from __future__ import annotations

from v41_config.errors import V41Error


class CheckpointError(V41Error):
    """A checkpoint cannot be read, or is not one of this model."""


class CheckpointNotFoundError(CheckpointError):
    """The directory, or a file that it needs, is not there."""


class AmbiguousCheckpointError(CheckpointError):
    """An index and a single `model.safetensors` lie side by side."""


class ShardNameError(CheckpointError):
    """The index names a shard by a path instead of a plain file name."""


class LinkEscapeError(CheckpointError):
    """A symlink leads out of the checkpoint directory and of the root the user allowed."""


class NotARegularFileError(CheckpointError):
    """A FIFO, device, socket or directory stands where a file should."""


class SourceChangedError(CheckpointError):
    """A file was replaced or written to after it had been checked."""


class DocumentTooLargeError(CheckpointError):
    """An index or header is larger than any real one; it is not read."""


class MalformedJsonError(CheckpointError):
    """An index or header is not JSON, or nested too deep."""


class DuplicateKeyError(CheckpointError):
    """A JSON object of an index or header has the same key twice."""


class IndexSchemaError(CheckpointError):
    """The index is JSON, but not `{"metadata": {...}, "weight_map": {tensor: file}}`."""


class IndexCoverageError(CheckpointError):
    """The index sends a tensor to a file that lacks it, or misses one that a file holds."""


class TotalSizeError(CheckpointError):
    """The index's `total_size` is not the sum of the tensors' bytes."""


class HeaderSchemaError(CheckpointError):
    """A safetensors header is JSON, but an entry is not `{dtype, shape, data_offsets}` of known types."""


class TensorOffsetsError(CheckpointError):
    """Data offsets overlap, leave a gap or disagree with dtype and shape."""


class TruncatedFileError(CheckpointError):
    """A file ends before the data that its header promises."""


class TrailingBytesError(CheckpointError):
    """A file goes on after the data that its header describes."""


class MissingTensorError(CheckpointError):
    """The config asks for a tensor that the checkpoint lacks."""


class TensorCountError(CheckpointError):
    """The config implies more tensors than an index can name."""


class UnknownTensorError(CheckpointError):
    """The checkpoint holds a tensor that the config does not explain."""


class DuplicateTensorError(CheckpointError):
    """Two shards hold a tensor of the same name."""


class TensorDtypeError(CheckpointError):
    """A tensor is stored in another number format than the released one."""


class TensorShapeError(CheckpointError):
    """A tensor has another shape than the config implies."""


class EngramCheckpointError(CheckpointError):
    """A checkpoint with Engram was opened as if text without it were the released model."""


class ScaleNanError(CheckpointError):
    """A block scale is E8M0 code 255, NaN."""


class NonFiniteWeightError(CheckpointError):
    """A stored E4M3, BF16 or F32 item is infinite or NaN."""


class FileReadError(CheckpointError):
    """A file cannot be opened, or the device fails to give its bytes."""


class ManifestError(CheckpointError):
    """The manifest of a sharded directory is missing, malformed, or disagrees with what stands beside it."""


class MissingRankError(CheckpointError):
    """A sharded directory lacks a rank."""


class DigestMismatchError(CheckpointError):
    """Bytes are not those whose digest the manifest states."""


class ShardCoverageError(CheckpointError):
    """The parts that ranks hold leave a gap in a tensor, or overlap."""


class ScalePairingError(CheckpointError):
    """A weight and its scale are not together, or not cut alike."""


class WeightLayoutError(CheckpointError):
    """Shards hold their weights in another byte layout than the reader takes."""


class ShardingError(V41Error):
    """A tensor cannot be cut as the layout asks."""


class LayoutGeometryError(ShardingError):
    """A matrix has a size that a byte layout has no place for."""


class UnknownLayoutError(ShardingError):
    """There is no byte layout of that name."""


class OutputError(V41Error):
    """Shards cannot be written where or as asked."""


class OutputConflictError(OutputError):
    """The output directory holds what must not be mixed with the shards: foreign files, other shards, another run."""


class OutputWriteError(OutputError):
    """The file system failed to take bytes."""


class DiskFullError(OutputWriteError):
    """The file system has no room, or the quota is used up."""


class SynthesisError(V41Error):
    """A synthetic checkpoint cannot be made or written as asked."""


class SparseFilesError(SynthesisError):
    """The file system has no sparse files: headers alone would take the disk of the whole checkpoint."""
