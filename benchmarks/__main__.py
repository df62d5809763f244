"""Print every figure beside its reference: ``python -m benchmarks [--quick]``."""

from __future__ import annotations

import argparse

from . import executor, on_rank

parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
parser.add_argument("--quick", action="store_true", help="three repetitions of each instead of nine")
repetitions = 3 if parser.parse_args().quick else 9
for topic in (executor, on_rank):
    for figure in topic.figures(repetitions):
        print(figure, flush=True)
