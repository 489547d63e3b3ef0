"""Deterministic synthetic checkpoints in the released on-disk format.

Every tensor is a pure function of config, seed and name, so any tensor can be made alone, in any order, on any
platform; a checkpoint's bytes depend on nothing else.
"""

from v41_loader.synth.checkpoint_writer import SynthesisReport, synthesize_checkpoint, synthesized_tensors
from v41_loader.synth.tensors import synthesize_tensor

__all__ = ["SynthesisReport", "synthesize_checkpoint", "synthesize_tensor", "synthesized_tensors"]
