"""TINY on eight ranks against the released reference's values: every stored tensor of every prefill file, bitwise.

At TINY's sizes the output partials of two or four TP ranks give the same bits as one rank's, so the files that were
made in one process hold for every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from v41_config import ParallelLayout
from v41_loader import open_checkpoint
from v41_model.forward_file import forward_tensors
from v41_model.golden_twin import same_bits
from v41_model.session import ModelSession

LENGTHS = (97, 1, 64, 33, 17, 2)
NOT_OF_A_FORWARD = {"tokens", "logits_last", "logits_torch_topk"}
"""Stored beside the forward: its input, a row of its logits, and the logits under another tie rule."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """TINY's operators are too small to share between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("layout", [ParallelLayout(4, 2), ParallelLayout(2, 2)], ids=["tp4-dp2", "tp2-dp2"])
def test_ragged_prefills_equal_the_vectors(vectors: Path, tiny_checkpoint: Path, layout: ParallelLayout) -> None:
    """All files in one step, spread over two DP groups."""
    stored = [load_file(vectors / f"prefill_{length:03d}.safetensors") for length in LENGTHS]
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        session = ModelSession.open(checkpoint, layout)
    computed = forward_tensors(session, [file["tokens"].tolist() for file in stored], layers=True)
    for index, file in enumerate(stored):
        own = {key: computed[f"request.{index}.{key}"] for key in file.keys() - NOT_OF_A_FORWARD}
        different = [key for key, tensor in own.items() if not same_bits(tensor, file[key])]
        assert different == [], f"prefill of {LENGTHS[index]} tokens"
        assert torch.equal(own["logits"][-1], file["logits_last"])
    assert len(stored[0]) > 200, "the full capture was compared"


def test_decode_equals_the_vectors(vectors: Path, tiny_checkpoint: Path) -> None:
    """The stored decode steps feed their own greedy tokens: ids and logits of every step."""
    stored = load_file(vectors / "decode_097_ownkeys.safetensors")
    steps = len(stored["decode_tokens"])
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        session = ModelSession.open(checkpoint, ParallelLayout(4, 2))
    computed = forward_tensors(session, [stored["tokens"].tolist()], decode=steps)
    assert computed["request.0.decode_tokens"].tolist() == stored["decode_tokens"].tolist()
    assert torch.equal(computed["request.0.decode_logits"], stored["logits"])
