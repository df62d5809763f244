"""`detect_launch` and `with_arguments`: what an environment says, and an error that helps where it says half of it.

What the launchers really set, `test_launched.py` sees; here are the variables as they are documented.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nn_parallel._engine.ranks import environment
from nn_parallel._engine.ranks.environment import Launch, detect_launch, with_arguments
from nn_parallel.errors import LaunchError

HOST = socket.gethostname()
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
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",  # not the rank of the node
    "PMIX_NAMESPACE": "1234",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "3"}
SLURM = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[08-09],m1-ib",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
ONE_NODE_STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n08", "SLURM_STEP_TASKS_PER_NODE": "2"}
ONE_NODE = SLURM | ONE_NODE_STEP | {"SLURM_NODEID": "0", "SLURM_PROCID": "1"}
MASTER = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29501"}


def _detect(environ: dict[str, str]) -> Launch:
    launch = detect_launch(environ)
    assert launch is not None
    return launch


NO_LAUNCH = {
    "nothing": {},
    "all of it empty": dict.fromkeys(BY_HAND, ""),
    "only a local rank": {"LOCAL_RANK": "1", "SLURM_PROCID": "0"},
    "a batch script of SLURM": BATCH,
    "a step of one task": ONE_NODE | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "a step without nodes": {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},
    "Hydra by its port": {"PMI_PORT": "h:1", "PMI_ID": "0"},
    "PMI of SLURM": {"PMI_RANK": "0", "PMI_SIZE": "2"},
    "Kubeflow Trainer v2, for torchrun": {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"},
}


@pytest.mark.parametrize("environ", NO_LAUNCH.values(), ids=NO_LAUNCH)
def test_what_is_no_launch(environ: dict[str, str]) -> None:
    """Nothing set, or nothing that starts a rank for each process, is no launch."""
    assert detect_launch(environ) is None


def test_an_interactive_shell_in_a_step_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at its terminal is alone; a step that is started there inherits the variable, and no terminal."""
    in_shell = SLURM | {"SLURM_PTY_PORT": "40123"}
    monkeypatch.setattr(environment, "has_terminal", lambda: True)
    assert detect_launch(in_shell) is None
    assert _detect(SLURM).launcher == "slurm"
    monkeypatch.setattr(environment, "has_terminal", lambda: False)
    assert _detect(in_shell) == _detect(SLURM)


# Of 2 + 2 + 1 ranks, or 2 + 2: launcher, rank of world size, local rank of local world size, node, master, one node.
LAUNCHES: dict[str, tuple[dict[str, str], tuple[object, ...]]] = {
    "torchrun": (TORCHRUN, ("torchrun", 2, 4, 0, 2, 1, "10.0.0.1", 29500, False)),
    "torchrun inside a step": (SLURM | TORCHRUN, ("torchrun", 2, 4, 0, 2, 1, "10.0.0.1", 29500, False)),
    "torchrun --virtual-local-rank": (
        TORCHRUN | {"RANK": "3", "LOCAL_RANK": "0"},
        ("torchrun", 3, 4, 1, 2, 1, "10.0.0.1", 29500, False),
    ),
    "torchrun, nodes of different size": (
        TORCHRUN | {"WORLD_SIZE": "5", "RANK": "4", "LOCAL_RANK": "1"},
        ("torchrun", 4, 5, 1, 2, 1, "10.0.0.1", 29500, False),
    ),
    "env:// inside mpirun": (
        OPEN_MPI | BY_HAND | {"LOCAL_RANK": "1"},
        ("env", 2, 4, 1, 4, 0, "10.0.0.1", 29500, False),
    ),
    "Kubeflow, one process per pod": (
        BY_HAND | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PET_NNODES": "4"},
        ("env", 2, 4, 0, 1, 2, "10.0.0.1", 29500, False),
    ),
    "env:// on this host of one node": (
        BY_HAND | {"MASTER_ADDR": HOST, "NNODES": "1"},
        ("env", 2, 4, 2, 4, 0, HOST, 29500, False),
    ),
    "a pod that is alone": (
        BY_HAND | {"RANK": "0", "WORLD_SIZE": "1"},
        ("env", 0, 1, 0, 1, 0, "10.0.0.1", 29500, False),
    ),
    "Open MPI": (OPEN_MPI | MASTER, ("openmpi", 3, 4, 1, 2, 1, "10.0.0.9", 29501, False)),
    "Open MPI inside a step": (SLURM | OPEN_MPI | MASTER, ("openmpi", 3, 4, 1, 2, 1, "10.0.0.9", 29501, False)),
    "Hydra": (HYDRA | MASTER, ("hydra", 3, 4, 1, 2, 1, "10.0.0.9", 29501, False)),
    "SLURM with a master": (SLURM | MASTER, ("slurm", 3, 5, 1, 2, 1, "10.0.0.9", 29501, False)),
    "SLURM's last node": (
        SLURM | MASTER | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
        ("slurm", 4, 5, 0, 1, 2, "10.0.0.9", 29501, False),
    ),
    "SLURM, ranks dealt out": (
        SLURM | MASTER | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
        ("slurm", 1, 5, 0, 2, 1, "10.0.0.9", 29501, False),
    ),
    "SLURM with the port alone": (SLURM | {"MASTER_PORT": "29501"}, ("slurm", 3, 5, 1, 2, 1, "n08", 29501, False)),
    "SLURM with its own rank in RANK": (
        SLURM | {"MASTER_PORT": "29501", "RANK": "3", "WORLD_SIZE": "5"},
        ("slurm", 3, 5, 1, 2, 1, "n08", 29501, False),
    ),
    "Ray Train": (
        BY_HAND | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"},
        ("env", 2, 4, 0, 2, 1, "10.0.0.1", 29500, False),
    ),
    "Azure ML's PyTorch": (
        BY_HAND | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        ("env", 2, 4, 0, 2, 1, "10.0.0.1", 29500, False),
    ),
    "PBS, by mpirun": (
        OPEN_MPI | MASTER | {"PBS_JOBID": "7", "PBS_TASKNUM": "1"},
        ("openmpi", 3, 4, 1, 2, 1, "10.0.0.9", 29501, False),
    ),
    "SageMaker, by torchrun": (
        TORCHRUN | {"SM_HOSTS": '["algo-1", "algo-2"]'},
        ("torchrun", 2, 4, 0, 2, 1, "10.0.0.1", 29500, False),
    ),
    "SLURM on one node": (ONE_NODE | {"MASTER_PORT": "1"}, ("slurm", 1, 2, 1, 2, 0, "127.0.0.1", 1, True)),
}


@pytest.mark.parametrize(("environ", "world"), LAUNCHES.values(), ids=LAUNCHES)
def test_what_is_a_launch(environ: dict[str, str], world: tuple[object, ...]) -> None:
    """Each launcher's variables give its world, also in the presence of another's that it was started by."""
    launch = _detect(environ)
    place = launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, launch.node_rank
    assert (launch.launcher, *place, launch.master_addr, launch.master_port, launch.one_node) == world
    assert set(launch.told_by) <= set(environ)


@pytest.mark.parametrize("environ", [SLURM, ONE_NODE, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}])
def test_the_port_follows_from_the_job(environ: dict[str, str]) -> None:
    """Alike on all ranks, another for another step or job, and none that systems hand out to anybody."""
    port = _detect(environ).master_port
    assert 10_000 <= port < 30_000
    changes = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "OMPI_COMM_WORLD_RANK": "0"}
    assert _detect(environ | {k: v for k, v in changes.items() if k in environ}).master_port == port
    others = [{"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}] if "SLURM_JOB_ID" in environ else [{"PMIX_NAMESPACE": "9"}]
    assert port not in [_detect(environ | other).master_port for other in others]


def test_mpi_on_one_node_needs_no_master() -> None:
    """All ranks are here: they meet on the loopback."""
    for environ in (OPEN_MPI, HYDRA):
        local_size = next(name for name in environ if name.endswith(("LOCAL_SIZE", "LOCALNRANKS")))
        launch = _detect(environ | {local_size: "4"})
        assert (launch.master_addr, launch.one_node) == ("127.0.0.1", True)


def test_the_local_rank_that_is_given_wins_under_every_launcher() -> None:
    """An explicit argument overrules each launcher's own name of it."""
    for environ in (TORCHRUN | {"GROUP_WORLD_SIZE": ""}, OPEN_MPI | MASTER, HYDRA | MASTER, SLURM):
        assert _detect(environ).local_rank != (wanted := 1 - _detect(environ).local_rank)
        assert _detect(with_arguments(environ, local_rank=wanted)).local_rank == wanted


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "Kubeflow: a rank for each pod": (
        BY_HAND | {"MASTER_ADDR": "localhost", "PET_NNODES": "4"},
        r"PET_NNODES=4 speaks of nodes.*Set LOCAL_RANK",
    ),
    "PAI: a rank for each node": (
        BY_HAND | {"MASTER_ADDR": HOST, "NPROC_PER_NODE": "8"},
        r"NPROC_PER_NODE=8 speaks of nodes.*Set LOCAL_RANK",
    ),
    "env:// in a job of several nodes": (
        BATCH | BY_HAND | {"MASTER_ADDR": HOST},
        r"SLURM_NNODES=3 speaks of nodes.*Set LOCAL_RANK",
    ),
    "an elastic number of nodes": (BY_HAND | {"MASTER_ADDR": HOST, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 speaks"),
    "a stale WORLD_SIZE in a step": (SLURM | {"WORLD_SIZE": "8"}, r"WORLD_SIZE=8 is set, and slurm says 5 .*Unset"),
    "the RANK of the batch script": (SLURM | {"RANK": "0"}, r"RANK=0 is set, and slurm says 3 \(.*SLURM_PROCID"),
    "a stale RANK under mpirun": (OPEN_MPI | MASTER | {"RANK": "0"}, "RANK=0 is set, and openmpi says 3"),
    "MPI on several nodes without a master": (OPEN_MPI, r"2 of the 4 ranks that openmpi .*Set MASTER_ADDR"),
    "Hydra on several nodes without a master": (HYDRA, r"2 of the 4 ranks that hydra .*Set MASTER_ADDR"),
    "no local rank of Open MPI's": (
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": ""},
        "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK are set and OMPI_COMM_WORLD_LOCAL_SIZE is not",
    ),
    "a rank beyond Open MPI's world": (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 cannot be"),
    "a local rank beyond Hydra's": (HYDRA | MASTER | {"MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2 cannot be"),
    "a word for a rank": (HYDRA | {"PMI_RANK": "first"}, "PMI_RANK='first' is not a whole number"),
    "a negative rank": (HYDRA | {"PMI_RANK": "-1"}, r"PMI_RANK=-1 cannot be: it must be 0\.\.3"),
    "a host with a port": (
        BY_HAND | {"MASTER_ADDR": "localhost:29500"},
        "MASTER_ADDR='localhost:29500' is not the name",
    ),
    "a URL for a host": (
        TORCHRUN | {"MASTER_ADDR": "http://localhost"},
        "is not the name or address of a host: write it without a port and without 'tcp://', for instance MASTER_ADDR=",
    ),
    "a port that cannot be": (SLURM | {"MASTER_PORT": "0"}, "MASTER_PORT=0 cannot be"),
    "a step without a rank": (SLURM | {"SLURM_PROCID": ""}, "are set and SLURM_PROCID is not"),
    "a step without a node": (SLURM | {"SLURM_NODEID": ""}, "SLURM_NODEID is not"),
    "a node beyond the step": (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3 cannot be"),
    "a local rank beyond the node": (SLURM | {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 cannot be"),
    "a broken list of nodes": (SLURM | {"SLURM_STEP_NODELIST": "n[08-09"}, "SLURM_STEP_NODELIST: 'n.08-09' is not"),
    "a broken count of tasks": (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "SLURM_STEP_TASKS_PER_NODE: '2x2' does"),
    "Lightning's own launcher": (
        MASTER | {"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        r"WORLD_SIZE=2, MASTER_ADDR=10.0.0.9 and MASTER_PORT=29501 are set, RANK is not",
    ),
    "tasks and their sum that differ": (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS=6: they contra"),
}


@pytest.mark.parametrize(("environ", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_named(environ: dict[str, str], message: str) -> None:
    """A platform that speaks of nodes, leftovers of another launch, what is missing: the message names the variable."""
    with pytest.raises(LaunchError, match=message):
        detect_launch(environ)


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
        told_by=(
            *("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_WORLD_SIZE"),
            *("GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
        ),
    )


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", " 127.0.1.1 ", "::1"])
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
        told_by=("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
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


def test_a_master_called_localhost_may_be_reached_by_other_nodes() -> None:
    """As that of Kubeflow's PyTorchJob knows itself, while the workers know it by its name."""
    assert not _detect(TORCHRUN | {"MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "2"}).one_node
    assert not _detect(BY_HAND | {"MASTER_ADDR": "localhost", "LOCAL_RANK": "0", "PET_NNODES": "2"}).one_node


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


@pytest.mark.parametrize("text", ["two", "--1", "1.5", "0x1", " "])
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
