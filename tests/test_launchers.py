"""`detect_launch` and `with_arguments`: what an environment says, and an error that helps where it says half of it."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nn_parallel.errors import LaunchError
from nn_parallel.launchers import Launch, detect_launch, with_arguments

BY_HAND = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = BY_HAND | {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def _detect(environ: dict[str, str]) -> Launch:
    launch = detect_launch(environ)
    assert launch is not None
    return launch


@pytest.mark.parametrize("environ", [{}, dict.fromkeys(BY_HAND, ""), {"LOCAL_RANK": "1", "SLURM_PROCID": "0"}])
def test_without_the_variables_no_launcher_started_us(environ: dict[str, str]) -> None:
    """Nothing set, or all of it set to nothing, is no launch."""
    assert detect_launch(environ) is None


def test_torchrun_tells_everything() -> None:
    """Each variable of torchrun's reaches its field."""
    assert detect_launch(TORCHRUN) == Launch(
        launcher="torchrun",
        rank=2,
        world_size=4,
        local_rank=0,
        local_world_size=2,
        node_rank=1,
        master_addr="10.0.0.1",
        master_port=29500,
        launcher_hosts_store=True,
        attempt=3,
        one_node=False,
    )


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_by_hand_on_the_loopback_all_ranks_are_local(master: str) -> None:
    """A loopback master means one node, so that the rank is the local rank, and rank 0 hosts the store."""
    assert detect_launch(BY_HAND | {"MASTER_ADDR": master}) == Launch(
        launcher="env",
        rank=2,
        world_size=4,
        local_rank=2,
        local_world_size=4,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=29500,
        launcher_hosts_store=False,
        attempt=0,
        one_node=True,
    )


def test_this_hosts_name_as_master_makes_the_rank_the_local_rank() -> None:
    """Our own host's name is this node too, but other nodes may know it by that name: not surely one node."""
    launch = _detect(BY_HAND | {"MASTER_ADDR": socket.gethostname()})
    assert (launch.local_rank, launch.local_world_size, launch.one_node) == (2, 4, False)
    assert launch.master_addr == socket.gethostname()


def test_another_host_as_master_needs_local_rank() -> None:
    """On several nodes the local rank cannot be guessed, and the error says which variable to set."""
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=10\.0\.0\.1 is another host.*Set LOCAL_RANK"):
        detect_launch(BY_HAND)
    launch = _detect(BY_HAND | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert (launch.local_rank, launch.local_world_size, launch.node_rank) == (0, 2, 1)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_an_empty_string_counts_as_unset(name: str) -> None:
    """An empty variable reads as if it was not there."""
    environ = TORCHRUN | {"MASTER_ADDR": "localhost"}
    assert detect_launch(environ | {name: ""}) == detect_launch({k: v for k, v in environ.items() if k != name})


def test_one_group_of_torchrun_is_one_node() -> None:
    """GROUP_WORLD_SIZE=1 says that all ranks are on this host, whatever the master's address."""
    assert _detect(TORCHRUN | {"GROUP_WORLD_SIZE": "1"}).one_node
    assert not _detect(TORCHRUN).one_node
    assert not _detect({k: v for k, v in TORCHRUN.items() if k != "GROUP_WORLD_SIZE"}).one_node


@given(present=st.sets(st.sampled_from(sorted(BY_HAND)), min_size=1, max_size=3), empty=st.booleans())
def test_a_half_set_environment_names_what_is_set_and_what_is_missing(present: set[str], empty: bool) -> None:
    """Every set variable with its value, every missing one, and the command that sets them all."""
    environ = {name: value if name in present else "" for name, value in BY_HAND.items() if name in present or empty}
    with pytest.raises(LaunchError) as caught:
        detect_launch(environ)
    there, _, rest = str(caught.value).partition(" set, ")
    missing, *advice = rest.splitlines()
    for name, value in BY_HAND.items():
        assert (f"{name}={value}" in there) == (name in present)
        assert (name in missing) == (name not in present)
    assert "torchrun --nproc-per-node=4 your_script.py" in "".join(advice)


def test_the_half_set_message_reads_as_documented() -> None:
    """One sentence on what is there, then what to do, with the world size that was asked for."""
    with pytest.raises(LaunchError) as caught:
        detect_launch({"RANK": "1", "WORLD_SIZE": "8"})
    assert str(caught.value).splitlines() == [
        "RANK=1 and WORLD_SIZE=8 are set, MASTER_ADDR and MASTER_PORT are not.",
        "Start with `torchrun --nproc-per-node=8 your_script.py`, which sets them all, or set what is missing "
        "(or unset RANK, WORLD_SIZE to run alone).",
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "5"}, r"RANK=5 cannot be: it must be 0\.\.3, as WORLD_SIZE=4"),
        ({"RANK": "4"}, r"RANK=4 cannot be"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE=0 cannot be: it must be at least 1"),
        ({"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 cannot be: it must be 1\.\.65535"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT=0 cannot be"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK=2 cannot be: it must be 0\.\.1, as 2 ranks run on this node"),
        ({"LOCAL_WORLD_SIZE": "0"}, r"LOCAL_WORLD_SIZE=0 cannot be"),
        ({"LOCAL_WORLD_SIZE": "5"}, r"LOCAL_WORLD_SIZE=5 cannot be"),  # more here than in all
    ],
)
def test_numbers_that_cannot_be_are_named_with_their_limits(wrong: dict[str, str], message: str) -> None:
    """A number out of its range is an error that names the variable, the value and what it may be."""
    with pytest.raises(LaunchError, match=message):
        detect_launch(TORCHRUN | wrong)


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "0x1", " "])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
def test_what_is_not_a_whole_number_is_named(name: str, text: str) -> None:
    """Words, signs and fractions in any number are a LaunchError that names the variable and what it holds."""
    with pytest.raises(LaunchError, match=f"{name}={text!r} is not a whole number"):
        detect_launch(TORCHRUN | {name: text})


def test_a_restart_count_that_is_no_number_is_named() -> None:
    """The elastic launcher's own count is read with the same care."""
    with pytest.raises(LaunchError, match="TORCHELASTIC_RESTART_COUNT='two' is not a whole number"):
        detect_launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "two"})


def test_arguments_alone_are_a_launch() -> None:
    """The four arguments do what the four variables do, and None leaves a variable alone."""
    environ = {"HOME": "/root", "WORLD_SIZE": "4"}
    merged = with_arguments(
        environ, rank=2, world_size=None, local_rank=0, master_addr="10.0.0.1", master_port=29500, local_world_size=2
    )
    assert merged == environ | BY_HAND | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert environ == {"HOME": "/root", "WORLD_SIZE": "4"}  # the caller's own is untouched
    assert _detect(merged).rank == 2


def test_half_the_arguments_are_a_half_set_environment() -> None:
    """Arguments that leave something open are reported as variables are."""
    with pytest.raises(LaunchError, match=r"RANK=0 is set, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not"):
        detect_launch(with_arguments({}, rank=0))


def test_equal_arguments_change_nothing() -> None:
    """Arguments that repeat what the launcher said leave all that it said in force."""
    same: dict[str, Any] = {"rank": 2, "world_size": 4, "master_addr": "10.0.0.1", "master_port": 29500}
    assert with_arguments(TORCHRUN, **same) == TORCHRUN


@pytest.mark.parametrize("changed", [{"rank": 3}, {"world_size": 8}])
def test_another_rank_drops_the_stale_local_facts(changed: dict[str, int]) -> None:
    """Where the process stood on its node belongs to the rank that the argument contradicts."""
    merged = with_arguments(TORCHRUN, **changed)
    assert not {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"} & set(merged)
    assert merged["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # the same master, so the same agent
    assert with_arguments(TORCHRUN, **changed, local_rank=1)["LOCAL_RANK"] == "1"


@pytest.mark.parametrize("changed", [{"master_addr": "10.0.0.2"}, {"master_port": 29501}])
def test_another_master_drops_torchruns_agent(changed: dict[str, Any]) -> None:
    """At another address no agent of torchrun's listens: rank 0 hosts the store, on its first attempt."""
    merged = with_arguments(TORCHRUN, **changed)
    assert not [name for name in merged if name.startswith("TORCHELASTIC_")]
    launch = _detect(merged)
    assert (launch.launcher, launch.launcher_hosts_store, launch.attempt) == ("env", False, 0)
    assert (launch.local_rank, launch.local_world_size) == (0, 2)  # the rank is the same, and so is its place


def test_one_node_of_a_stale_launch_is_not_believed() -> None:
    """Torchrun on one node says nothing of a world with another master: its sockets must not stay on the loopback."""
    one_node = TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    merged = with_arguments(one_node, rank=3, world_size=8, local_rank=1, master_addr="10.0.0.9", master_port=1234)
    assert not _detect(merged).one_node
