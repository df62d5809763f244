"""Print every figure beside its reference: ``python -m benchmarks [--quick] [TOPIC ...]``.

The results can be written down, and the page of the documentation is made from them::

    python -m benchmarks --json docs/project/performance.json
    python -m benchmarks --page docs/project/performance.json    # writes performance.md and its plots beside it
"""

from __future__ import annotations

import argparse
import importlib
import json
import warnings
from dataclasses import asdict
from pathlib import Path

from .harness import HEADER, Figure, as_line, environment

# Those with peers last: the threads of Ray live as long as this process.
TOPICS = ["start", "on_rank", "failures", "training", "checkpoints", "scale", "calls", "data"]

parser = argparse.ArgumentParser(
    prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}; all if none is given")
parser.add_argument("--quick", action="store_true", help="within a minute: two repetitions, fewer peers and workers")
parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
parser.add_argument("--page", type=Path, metavar="FILE", help="measure nothing: make the page from such results")
options = parser.parse_args()
if options.json and (options.quick or options.topics):
    parser.error("--json writes down a whole run: neither --quick nor topics")
if wrong := set(options.topics) - set(TOPICS):
    parser.error(f"there is no topic {', '.join(sorted(wrong))}: choose from {', '.join(TOPICS)}")


def main() -> None:
    warnings.simplefilter("ignore")
    measured_in = environment()
    print("  ".join(f"{name} {value}" for name, value in measured_in.items()), as_line(HEADER), sep="\n")
    figures: list[Figure] = []
    for topic in options.topics or TOPICS:
        for figure in importlib.import_module(f"benchmarks.{topic}").figures(2 if options.quick else 9):
            figure.topic = topic
            figures.append(figure)
            print(as_line(figure.cells()), flush=True)
    if options.json:
        results = {"environment": measured_in, "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if options.page:
        from .page import write_page

        write_page(options.page)
    else:
        main()
