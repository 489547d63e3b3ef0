"""Eight ranks in one process against one process: prefill through a block at the released model's dimensions.

C2A Full of FLASH6 (FLASH's dimensions, eight experts), TP4, DP2, EP8: what the ranks compute more than once (the
projections and caches that TP ranks hold alike, weights unpacked by each of them) and what they move is the difference.
Both sides run in turn on the same threads and must give the same bits.

    python bench_ranks.py [--tokens 512] [--repeats 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from instruments.operator_times import OperatorTimes
from torch import Tensor

from v41_config import FLASH6, AttentionMode, DpGroupMetadata, ParallelLayout, TokenMapping
from v41_goldens import ReferenceEngine, block
from v41_goldens.weights import LayerWeights
from v41_loader import rank_part, shard_tensor, synthesize_tensor
from v41_loader.synth import synthesized_tensors
from v41_model.communicator import Communicator
from v41_model.expert_parallel import expert_owners
from v41_model.golden_twin import same_bits
from v41_model.local_world import LocalWorld
from v41_model.operators import Operators
from v41_model.rank_layer import RankStep, ResidualStreams, sequence_parallel_layer

LAYOUT = ParallelLayout(tp=4, dp=2)
LAYER = next(layer for layer in FLASH6.layers if layer.mode is AttentionMode.C2A_FULL)


def layer_tensors() -> dict[str, Tensor]:
    """The layer's synthetic weights."""
    prefix = f"layers.{LAYER.layer_id}."
    names = [name for name in synthesized_tensors(FLASH6) if name.startswith(prefix)]
    return {name: synthesize_tensor(FLASH6, 4106, name) for name in names}


def rank_weights(tensors: dict[str, Tensor], rank: int) -> LayerWeights:
    known = synthesized_tensors(FLASH6)
    held = {
        name: shard_tensor(name, tensor, FLASH6, LAYOUT, rank)
        for name, tensor in tensors.items()
        if rank_part(known[name], FLASH6, LAYOUT, rank) is not None
    }
    return LayerWeights.from_tensors(FLASH6, LAYER.layer_id, held)


def one_process(weights: LayerWeights, x_hc: Tensor, pre_mix: Tensor) -> Callable[[], Tensor]:
    engine = ReferenceEngine(FLASH6, None, LAYOUT.dp, len(x_hc) // LAYOUT.dp)

    def run() -> Tensor:
        for request in range(LAYOUT.dp):
            engine.release(request)
        context = engine.context(list(range(LAYOUT.dp)), [len(x_hc) // LAYOUT.dp] * LAYOUT.dp)
        return block(context, LAYER, weights, x_hc, pre_mix, LAYOUT.tp)[0]

    return run


def eight_ranks(
    weights: list[LayerWeights], x_hc: Tensor, pre_mix: Tensor, operators: Operators
) -> Callable[[], Tensor]:
    world = LocalWorld(LAYOUT)
    rows = len(x_hc) // LAYOUT.dp
    engines = [ReferenceEngine(FLASH6, None, 1, rows) for _ in world.local_ranks]
    owners = expert_owners(FLASH6, LAYOUT)

    def program(communicator: Communicator) -> Tensor:
        rank = communicator.rank
        dp_rank = LAYOUT.dp_rank(rank)
        context = engines[rank].context([0], [rows])
        mapping = TokenMapping(LAYOUT, dp_rank, rows, rows)
        step = RankStep(FLASH6, DpGroupMetadata(mapping, context.metadata), context, owners, communicator, operators)
        packed = slice(dp_rank * rows, (dp_rank + 1) * rows)
        streams = ResidualStreams(mapping.shard(x_hc[packed], rank), mapping.shard(pre_mix[packed], rank))
        return sequence_parallel_layer(step, LAYER, weights[rank], streams).x_hc.tokens

    def run() -> Tensor:
        for engine in engines:
            engine.release(0)
        return torch.cat(world.run(program))

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tensors = layer_tensors()
    generator = torch.Generator().manual_seed(0)
    x_hc = torch.randn(options.tokens, FLASH6.hc_mult, FLASH6.hidden_size, generator=generator).bfloat16()
    pre_mix = torch.rand(options.tokens, FLASH6.hc_mult, generator=generator)
    timed = OperatorTimes()
    ranks = [rank_weights(tensors, rank) for rank in range(LAYOUT.world_size)]
    runs = {
        "one process": one_process(LayerWeights.from_tensors(FLASH6, LAYER.layer_id, tensors), x_hc, pre_mix),
        "eight ranks": eight_ranks(ranks, x_hc, pre_mix, timed.table()),
    }
    print(f"torch {torch.__version__}, {options.threads} threads, {options.tokens} tokens, best of {options.repeats}")
    best = dict.fromkeys(runs, float("inf"))
    processor = dict.fromkeys(runs, float("inf"))
    outputs = {}
    with torch.inference_mode():
        for _ in range(options.repeats):
            for name, run in runs.items():
                began, began_processor = time.perf_counter(), time.process_time()
                outputs[name] = run()
                best[name] = min(best[name], time.perf_counter() - began)
                processor[name] = min(processor[name], time.process_time() - began_processor)
    for name, seconds in best.items():
        print(f"{name:12}{seconds:9.3f} s, {processor[name]:.3f} s of processors")
    print(timed.report(options.repeats))
    print(f"eight ranks take {best['eight ranks'] / best['one process']:.2f} times as long (wanted: at most 1.5)")
    ratio = processor["eight ranks"] / processor["one process"]
    print(f"    and {ratio:.2f} times the processor time, which a busy machine disturbs less")
    equal = same_bits(outputs["one process"], outputs["eight ranks"])
    print(f"the streams are {'equal to the bit' if equal else 'DIFFERENT'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
