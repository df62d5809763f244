"""SLURM's notation for hosts and tasks: every list that it can write is read back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nn_parallel.hostlists import expand_hostlist, expand_task_counts

LITERALS = st.text("abz.-_", min_size=1, max_size=4)
RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=3)


@given(st.lists(st.lists(st.one_of(LITERALS, RANGES), min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_list_expands_to_the_hosts_that_it_was_written_for(
    items: list[list[str | list[tuple[int, int, int]]]],
) -> None:
    """Literals and brackets in any order, ranges with leading zeros or without, every combination, in order."""
    written, hosts = [], list[str]()
    for item in items:
        texts, choices = [], []
        for part in item:
            if isinstance(part, str):
                texts.append(part)
                choices.append([part])
                continue
            numbers, ranges = [], []
            for first, more, width in part:
                numbers += [f"{number:0{width}}" for number in range(first, first + more + 1)]
                ranges.append(f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}")
            texts.append(f"[{','.join(ranges)}]")
            choices.append(numbers)
        written.append("".join(texts))
        hosts += ["".join(combination) for combination in itertools.product(*choices)]
    assert expand_hostlist(",".join(written)) == hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a[1-2,07]-ib,b3", ["a1-ib", "a2-ib", "a07-ib", "b3"]),
        ("a[1-2].x.org,b[1-3]-y", ["a1.x.org", "a2.x.org", "b1-y", "b2-y", "b3-y"]),
        ("rack[0-1]n[09-10]", ["rack0n09", "rack0n10", "rack1n09", "rack1n10"]),
        ("localhost", ["localhost"]),
    ],
)
def test_lists_as_clusters_write_them(text: str, hosts: list[str]) -> None:
    """Suffixes, leading zeros, two brackets in a name, and a single host."""
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[x]", "a[1,]", "a b", "a[[1]]"]
)
def test_what_is_no_list_of_hosts(text: str) -> None:
    """An error that shows the text and what one looks like."""
    with pytest.raises(ValueError, match="is not a list of hosts in SLURM's notation, which is like"):
        expand_hostlist(text)


def test_a_range_that_goes_backwards() -> None:
    """It would be no host at all, silently."""
    with pytest.raises(ValueError, match=r"\[3-1\] in a list of hosts goes backwards"):
        expand_hostlist("a[3-1]")


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5)), min_size=1, max_size=5))
def test_task_counts_expand(runs: list[tuple[int, int]]) -> None:
    """A count for each node, in order, whether runs of equal counts are put together or not."""
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_task_counts(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2(x", "2(3)", "x2", "2,", "-1"])
def test_what_is_no_task_count(text: str) -> None:
    """An error that shows the text and what one looks like."""
    with pytest.raises(ValueError, match="does not count the tasks of nodes"):
        expand_task_counts(text)
