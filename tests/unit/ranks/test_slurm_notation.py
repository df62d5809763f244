"""SLURM's notation for hosts and tasks: whatever it can write is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nn_parallel._engine.ranks.environment import first_host, task_counts

LITERALS = st.text("abz.-_", min_size=1, max_size=4)
RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=3)


@given(st.lists(st.lists(st.one_of(LITERALS, RANGES), min_size=1, max_size=3), min_size=1, max_size=4))
def test_the_first_host_is_found(
    items: list[list[str | list[tuple[int, int, int]]]],
) -> None:
    """Literals and brackets in any order, ranges with leading zeros or without."""
    written, first_hosts = [], list[str]()
    for item in items:
        texts, firsts = [], []
        for part in item:
            if isinstance(part, str):
                texts.append(part)
                firsts.append(part)
                continue
            ranges = [
                f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}"
                for first, more, width in part
            ]
            texts.append(f"[{','.join(ranges)}]")
            firsts.append(ranges[0].partition("-")[0])
        written.append("".join(texts))
        first_hosts.append("".join(firsts))
    assert first_host(",".join(written)) == first_hosts[0]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a[01-02,7]-ib,b3", "a01-ib"),
        ("a[1-2].x.org,b[1-3]-y", "a1.x.org"),
        ("rack[0-1]n[09-10]", "rack0n09"),
        ("localhost", "localhost"),
    ],
)
def test_lists_as_clusters_write_them(text: str, host: str) -> None:
    """Suffixes, leading zeros, two brackets in a name, and a single host."""
    assert first_host(text) == host


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[x]", "a[1,]", "a b", "a[[1]]"]
)
def test_what_is_no_list_of_hosts(text: str) -> None:
    """An error that shows the text and what one looks like."""
    with pytest.raises(ValueError, match="is not a list of hosts in SLURM's notation, which is like"):
        first_host(text)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 5)), min_size=1, max_size=5))
def test_task_counts_expand(runs: list[tuple[int, int]]) -> None:
    """A count for each node, in order, whether runs of equal counts are put together or not."""
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert task_counts(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2(x", "2(3)", "x2", "2,", "-1"])
def test_what_is_no_task_count(text: str) -> None:
    """An error that shows the text and what one looks like."""
    with pytest.raises(ValueError, match="does not count the tasks of nodes"):
        task_counts(text)
