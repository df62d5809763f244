"""`ParallelExecutor(engine="ray")` beside bare actors of Ray: ``python -m benchmarks.cluster``.

The cluster is on this machine: its processes share the cores, however many nodes it has. The figures of the page on Ray
are those of such a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import ray
import torch
from ray.cluster_utils import Cluster

from nn_parallel import ParallelExecutor

from .calls import of_a_script
from .harness import HEADER, Figure, as_line, measure
from .peers import bare_actors

CPUS, CALLS = 8, 50


def main(repetitions: int = 9) -> None:
    warnings.simplefilter("ignore")
    print(as_line(HEADER))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    cluster.add_node(num_cpus=CPUS)
    ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
    try:
        for placement, where in (("pack", "on one node"), ("spread", "on two nodes")):
            for figure in _beside_actors(placement, where, repetitions):
                print(as_line(figure.cells()), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _beside_actors(placement: str, where: str, repetitions: int) -> Iterator[Figure]:
    data = torch.ones(16 << 20)
    _, call = bare_actors(2, scheduling_strategy="SPREAD" if placement == "spread" else "DEFAULT")
    with ParallelExecutor(engine="ray", num_workers=2, devices="cpu", placement=placement) as pool:
        for name, fn, arguments, goal, calls in (
            ("warm run(fn)", of_a_script(_one), (), 1.1, CALLS),
            ("64 MiB", of_a_script(_one), (data,), 1.0, 1),
        ):
            yield measure(
                f'engine="ray": {name} to 2 workers {where}',
                lambda fn=fn, arguments=arguments: pool.run(fn, *arguments),  # type: ignore[misc]
                "bare actors of Ray",
                lambda fn=fn, arguments=arguments: call(fn, *arguments),  # type: ignore[misc]
                goal=goal,
                repetitions=repetitions,
                calls=calls,
            )


def _one(*_: torch.Tensor) -> int:
    return 1


if __name__ == "__main__":
    main()
