"""What a tensor axis costs the host, and what the compiler makes of it, on groups that send
nothing.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from tests.parallel import host_time

pytestmark = pytest.mark.slow


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a process of its own, which makes a group of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.guarantee
@pytest.mark.parametrize(("layout", "most"), [("tensor 8", 3.0), ("fsdp 4 × tensor 8", 4.8)])
def test_a_block_takes_the_host_little_longer_than_on_one_device(layout, most):
    took, plain = alone(host_time.measure, layout)
    assert took / plain < most, (took, plain)


def compiled() -> tuple[list[tuple[int, int, int, int]], dict[str, int]]:
    """Return of each graph its gathers and sums of parts, and those that Inductor would overlap."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.fx_passes.micro_pipeline_tp import (
        find_all_gather_patterns,
        find_reduce_scatter_patterns,
    )

    found = []

    def count(graph: Any, _: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        found.append(
            (
                sum("all_gather_into" in name for name in names),
                len(find_all_gather_patterns(graph.graph)),
                sum("reduce_scatter_tensor" in name for name in names),
                len(find_reduce_scatter_patterns(graph.graph)),
            )
        )
        return graph

    make, backend = torch.compile, aot_autograd(fw_compiler=count, bw_compiler=count)
    torch.compile = lambda function, *, mode: make(function, backend=backend)  # pyright: ignore[reportAttributeAccessIssue]
    model = host_time.built(host_time.LAYOUTS["tensor 8"], compile="block")
    for _ in range(2):
        host_time.step(model)
    return found, dict(torch._dynamo.utils.counters["graph_break"])


def test_all_blocks_share_a_graph_whose_collectives_inductor_overlaps():
    assert alone(compiled) == ([(2, 2, 2, 2), (2, 2, 2, 2)], {})
