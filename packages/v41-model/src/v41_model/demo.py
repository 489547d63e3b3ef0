"""``python -m v41_model.demo``: TINY on eight ranks (TP4, DP2, EP8), checked against one process to the bit.

Six requests of lengths 3, 2, 3 in each DP group show the layout on eight tokens per group; then they and a long
prompt are generated together, and every step's residual rows, routes and logits are compared with the golden.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from v41_config import TINY, ParallelLayout
from v41_goldens.weights import ModelWeights
from v41_loader import Checkpoint, open_checkpoint, synthesize_checkpoint
from v41_model.collective_log import CollectiveKind
from v41_model.generation import GroupStep, Request, admit, advance
from v41_model.golden_twin import GoldenTwin
from v41_model.layout_table import LayoutRow, OperatorTrace, format_layout_table, layout_rows
from v41_model.operators import Operators
from v41_model.session import ModelSession

LAYOUT = ParallelLayout(tp=4, dp=2)
SEED = 4105
EXAMPLE_LENGTHS = (3, 2, 3)
LONG_PROMPT = 300
NEW_TOKENS = 6
SHOWN_LAYER, SHOWN_RANK = 2, 1


def main() -> int:
    """Run the demonstration; 0 only if every check held."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="v41-demo-") as temporary:
        directory = Path(temporary) / "tiny"
        synthesize_checkpoint(TINY, SEED, directory)
        print(f"checkpoint: TINY, seed {SEED}, released format, {time.perf_counter() - started:.1f} s")
        with open_checkpoint(directory) as checkpoint:
            failures = [*layout_example(checkpoint), *generation(checkpoint)]
    elapsed = f"{time.perf_counter() - started:.0f} s"
    if failures:
        print(f"FAIL ({elapsed}): {failures[0]}" + (f", and {len(failures) - 1} more" if failures[1:] else ""))
        return 1
    print(f"PASS ({elapsed}): tokens, residual rows, routes and logits equal the single-process golden to the bit")
    return 0


def example_requests(new_tokens: int) -> list[Request]:
    """Requests A to F; their 16 token ids are all different, so that a token can be recognised by its embedding."""
    ids = np.random.default_rng(SEED).choice(np.arange(3, TINY.vocab_size), LAYOUT.dp * sum(EXAMPLE_LENGTHS), False)
    prompts = np.split(ids, np.cumsum(EXAMPLE_LENGTHS * LAYOUT.dp)[:-1])
    return [Request(tuple(prompt.tolist()), new_tokens) for prompt in prompts]


def layout_example(checkpoint: Checkpoint) -> list[str]:
    """One prefill of the example: the table of one layer, and the two counts. What did not hold."""
    session = ModelSession.open(checkpoint, LAYOUT)
    trace = OperatorTrace(session.world)
    session.operators = trace.observe(Operators())
    requests = example_requests(new_tokens=1)
    steps = advance(session, admit(session, requests), capture=True)

    log = session.world.communicators[SHOWN_RANK].log
    rows = shown_rows(session, trace, steps)
    print(f"\nrank {SHOWN_RANK}, layer {SHOWN_LAYER}; each DP group has requests of {EXAMPLE_LENGTHS} tokens:")
    print(format_layout_table(rows))
    shown = [row.collective for row in rows if row.collective is not None]
    hidden = [r for r in log.records if r.site.layer == SHOWN_LAYER and r not in shown]
    failures = [f"a collective that the table does not show: {record}" for record in hidden]
    failures += check_unique_tokens(steps, checkpoint.tensor("embed.weight"), requests)
    return failures + check_routes(trace, session)


def shown_rows(session: ModelSession, trace: OperatorTrace, steps: Sequence[GroupStep]) -> list[LayoutRow]:
    """The table's rows of the layer and rank it shows."""
    rank = SHOWN_RANK
    captured = steps[LAYOUT.dp_rank(rank)].output.captures[LAYOUT.tp_rank(rank)].tensors
    heads = {name: tuple(captured[f"layer.{SHOWN_LAYER:02d}.{name}"].shape) for name in ("q", "sparse_attn_out")}
    return layout_rows(trace.of_layer(rank, SHOWN_LAYER), session.world.communicators[rank].log, SHOWN_LAYER, heads)


def check_unique_tokens(steps: Sequence[GroupStep], table: Tensor, requests: Sequence[Request]) -> list[str]:
    """Recognise every row that a rank starts with by its embedding: each token must be on exactly one rank."""
    expected = sorted(token for request in requests for token in request.prompt)
    found = []
    print("\ntokens on each rank (recognised by their embeddings):")
    for group, step in enumerate(steps):
        for tp_rank, capture in enumerate(step.output.captures):
            matches = (capture.tensors["embed_out"].unsqueeze(1) == table).all(dim=-1)
            ids = [int(i) for row in matches for i in row.nonzero()]
            found += ids
            print(f"  rank {group * LAYOUT.tp + tp_rank}: {ids}")
    print(f"  {len(found)} rows on all ranks, {len(set(found))} different tokens, {len(expected)} in the requests")
    return [] if sorted(found) == expected else ["tokens are lost or doubled over the ranks"]


def check_routes(trace: OperatorTrace, session: ModelSession) -> list[str]:
    """In every layer the experts receive each token once per chosen expert, and the shared expert sees it once."""
    tokens = LAYOUT.dp * sum(EXAMPLE_LENGTHS)
    expected = tokens * TINY.num_experts_per_tok
    failures = []
    for layer in range(TINY.num_hidden_layers):
        received, shared = (
            [c.arguments[0][0] for rank in range(LAYOUT.ep) for c in trace.of_layer(rank, layer) if c.operator == name]
            for name in ("routed_experts", "shared_expert")
        )
        if layer == SHOWN_LAYER:
            print(f"routes received per rank: {received}")
            print(f"  together {sum(received)} = {tokens} tokens x {TINY.num_experts_per_tok} experts per token")
            print(f"shared expert rows per rank: {shared}, together {sum(shared)}")
        if sum(received) != expected:
            failures.append(f"layer {layer}: {sum(received)} routes instead of {expected}")
        if sum(shared) != tokens:
            failures.append(f"layer {layer}: {sum(shared)} shared expert rows instead of {tokens}")
    reduced = [c.rank for c in session.world.communicators if c.log.of(CollectiveKind.ALL_REDUCE)]
    return [*failures, f"ranks {reduced} called an all-reduce"] if reduced else failures


def generation(checkpoint: Checkpoint) -> list[str]:
    """Generate from the example and a long prompt, each step beside the golden. What differed."""
    random = np.random.default_rng(SEED + 1)
    long_prompt = Request(
        (TINY.bos_token_id, *random.integers(3, TINY.vocab_size, LONG_PROMPT - 1).tolist()), NEW_TOKENS
    )
    requests = [*example_requests(NEW_TOKENS), long_prompt]
    weights = ModelWeights.from_tensors(TINY, checkpoint.read(checkpoint.names))
    session = ModelSession.open(checkpoint, LAYOUT, operators=Operators())
    groups = admit(session, requests)
    twin = GoldenTwin(TINY, LAYOUT, weights, requests)
    names = {id(request): name for request, name in zip(requests, "ABCDEFG", strict=True)}
    print(f"\ngenerating {NEW_TOKENS} tokens each; request {names[id(long_prompt)]} has {LONG_PROMPT} tokens:")
    differences: list[str] = []
    while any(group.running for group in groups):
        began = time.perf_counter()
        steps = advance(session, groups, capture=True)
        took = time.perf_counter() - began
        print("  " + " ".join(f"{names[id(r)]}:{t}" for s in steps for r, t in s.new_tokens) + f"  ({took:.2f} s)")
        differences += twin.step(steps)
    return [f"{name} differs from the golden" for name in differences]


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m v41_model.demo", description=__doc__).parse_args()
    torch.set_num_threads(1)
    sys.exit(main())
