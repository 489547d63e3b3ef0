"""DeepSeek-V4.1-Flash: checkpoint reading, validation, TP/EP sharding and synthetic checkpoints."""

from v41_loader.synth import synthesize_checkpoint, synthesize_tensor

__all__ = ["synthesize_checkpoint", "synthesize_tensor"]
