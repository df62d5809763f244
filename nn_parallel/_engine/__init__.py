"""The engine beneath the public functions. Nothing here is public; any release may change it.

The map: every file, from the bottom up. A file imports only files that stand before it in this list, and from
outside this folder only `nn_parallel.errors`, `nn_parallel.world` and `nn_parallel._version`. `shared` and `pool`
appear several times, because some of their files import files of the folders in between. Shared files lie in this
folder itself::

    shared
        garbage_collection  a pause of Python's garbage collector during an import
        descendants         the processes that a process has started
        polling             waits that check a condition again and again, at first without sleeping
        interrupts          an exception raised in the main thread from another thread or by a signal
        torch_private       the parts of torch that are not public
        background          work in a thread that goes on after the call that began it
        tracebacks          tracebacks without frames of this package
        failures            an exception as plain data; the `RankError` of several ranks
        process_environment  environment, directory and import path of the script; what is installed
        devices             the devices of this machine; the parameter ``device`` of a user's function
        diagnostics         a search for the part of an object that cannot be pickled
        pickling            objects to bytes and back, tensors by their storage
        stack_dump          the stack of this process, and the stacks of a job for ``nn-parallel stacks``
    ranks: how the processes of a world find each other, talk, and fail together
        environment         a launcher's variables -> rank, world size, address
        times               how long ranks wait, and how often they look
        sockets             the connections of this process
        store               the TCPStore: every key and record that ranks exchange
        links               the connections between rank 0 and other nodes
        flight_recorder     the collectives that this process has entered, as torch records them
        nccl                settings and errors of NCCL
        group               making, closing and making again the process group
        context             this process as a rank: its world, store and process group
        liveness            the ranks that have died
        records             the records about calls and blocks that ranks write into the store
        main_thread         the line of code that the main thread executes
        status_board        writes the status of this rank into the store, reads those of the others
        watchdog            the thread that frees a stuck rank
        blocks              calls of one rank, and blocks that all ranks enter and leave together
        uncaught            an exception that ends a rank outside all blocks
        rendezvous          the ranks of a launcher meet in a store
        membership          join and leave a world
        exchange            objects from rank to rank
        rank_choice         the ranks that an argument ``rank`` names
        run_on_ranks        the decorator of `on_rank`, the block of `rank_first`
        stop_signals        a signal to one rank stops all ranks at the same step
    by_value: how functions, classes and globals of a script reach a worker
        globals             the receiving side: functions, classes and globals of another process
        reducer             pickles functions and classes by name, by the key of a copy that the worker has, or by value
        packer              the sending side: packs a call
    pool: workers, and the calls of `ParallelExecutor`
        memory_files        shared memory for large payloads
        channel             messages between the pool and a worker
        messages            the headers of these messages
        pool_store          the store through which the ranks of a `run` communicate
        worker              the main loop of a worker
        forkserver          the process that forks workers and reaps them
        forkserver_client   the script's side of the fork server
        progress, bars      the progress bar of a map; the progress bars that workers draw
        output              copies the output of workers to the script's streams
        event_loop          descriptors, timers and posted functions, in one thread
        futures             the objects through which a caller waits for results
        tasks               the tasks of a pool: run, submit, map, resize
        protocols           the interfaces between executor, pool and workers
        worker_process      a worker process on this machine
        site                starts the workers of a pool on this machine
        supervisor          the thread of a pool: its tasks and workers
        pool                the calls of an executor on started workers
        launched_ranks      the calls of an executor on the ranks of a launcher
    ray: workers on a Ray cluster
        worker              the actor of a worker
        room                starts the workers of a pool on the cluster
    pool: the choice of a backend
        backend             launched ranks, workers on this machine, or workers on Ray
    shared
        data_parallel       a batch split over devices, in threads

The words:

rank
    One process of a world. A single task (`submit`, `map`) runs in a world of its own.
worker
    One process of a pool. During `run` each worker is a rank.
task
    A unit of work for a pool: a `run`, a `submit`, an item of `map`, a resize.
place
    The position of a worker in its pool, and its rank during a `run`. A new worker takes the place of one that died.
call
    A step that every rank makes and counts: the call of a function that one rank runs while the others wait, the
    beginning or the end of a block, or a barrier.
block
    Code that all ranks begin and end together.
barrier
    A point at which all ranks wait for each other: the beginning of a block, its end, or a call of `barrier`.
generation
    All calls and barriers between two failures of blocks. In each generation, they are numbered again from one. In a
    pool, each `run` begins a new generation too.
store
    The TCPStore through which the ranks find each other. `StoreClient` is a connection to it.
watchdog
    The thread of a rank that frees the rank from a wait that cannot end.
supervisor
    The thread of a pool, which owns the tasks and workers of the pool.
channel
    The socket between a pool and one worker.
order
    A command of a pool to one worker, such as to cancel a task. The worker follows it even while a task runs.
memory file
    An anonymous file (memfd) that holds a large payload. Each receiver maps it.
fork server
    The process that has imported torch, and forks workers in milliseconds.
handle
    The result of `put`: an object that the workers keep for later calls.
definition
    A function or class of the script that is pickled by value, once for each worker.
binding
    The assignment of a value to a global of the script. A call sends the bindings of the globals that its function
    uses. Each binding has a number, which changes when the script assigns another value.

The invariants, which every change keeps:

- Outcomes travel through the store, beside the collectives. A failing rank cannot know in which collective the others
  are. Nothing that comes from the store is unpickled.
- Every rank raises the *cause*, which is the first failure. An error that is only a consequence, such as "connection
  closed", is not reported.
- All ranks go through the same blocks in the same order, and each block has failed on all ranks or on none.
- A failing rank closes no more than it must. A failing call of one rank closes no group. A failing block closes the
  process group; `initialize_ddp` makes the group again on the same store, under a name with the new generation.
- The package never concludes from elapsed time alone that a rank is stuck. Only the ``timeout`` of the user, or its
  default, ends a wait for a slow rank. A node counts as lost when its kernel has answered nothing for a minute, or for
  a third of the ``timeout`` if that is shorter.
- If a worker is lost, only its task fails. The pool then starts another worker in the same place.
- Each process, thread, descriptor, variable and file is removed when the task or object that needs it ends. There is
  one exception: a process keeps a few memory files, to fill them again for later payloads (memory_files).

The rest of this text follows four events through the modules.

A failure in a function that one of two ranks runs, here with ``@on_rank(1)``, until both ranks raise the failure:

1. The decorator has called `Blocks.call` (blocks) on each rank (`call_on_rank`, run_on_ranks). On rank 1 the exception
   comes out of the user's function into `Blocks.call`. `StatusBoard.post_failure`
   (status_board) writes the failure as plain data to the key ``failures/1``, and then writes to ``status/1`` that the
   call has ended.
2. Rank 0 waits in `_await_outcome` (blocks) and polls ``status/1``. Once the call has ended, `failures_of_call`
   (status_board) reads ``failures/1``.
3. On both ranks `_error` (blocks) makes a `RankError` with the exception of rank 1. On rank 0, `Failure.rebuild`
   (failures) has made this exception anew. The ``__cause__`` of this exception is a `RemoteTraceback`, which holds
   the traceback on rank 1 as text. The decorator raises the `RankError` to its caller.

No watchdog takes part, and no group is closed.

A failure in a block of two ranks. Rank 1 raises, and rank 0 is in a collective:

1. `LaunchedRanks.__enter__` (launched_ranks) has entered `Blocks.block` (blocks) on each rank. On rank 1 the exception
   comes out of the user's code into `Blocks.block`, and there into `_on_all_ranks`.
   `_leave_block` describes the exception as plain data (failures), and `_end_generation` writes this description into
   the store, to the key ``ended/G`` (store, records). G is the number of the generation. Before that it adds `END_MARK`
   to the count of arrivals in ``arrived/G``, so that no further barrier of this generation can become complete.
2. The watchdog thread of rank 0 finds ``ended/G`` (`Watchdog._has_ended`). `_free` calls `_end_body`, which
   interrupts the main thread (interrupts) and ends the connections of gloo, or aborts NCCL (`Group.abort`).
3. The main thread of rank 0 comes to `_on_all_ranks` as well, because `Interrupted` was raised, or because its
   collective raised an error about the lost connection. `_failures_to_report` recognizes both as consequences: an
   `Interrupted` by its type, the other one by its text (`lost_connection`, failures) and because ``ended/G`` exists.
   Rank 0 does not report such an error, and rebuilds the exception of rank 1 from ``ended/G``. (If rank 0 waits at the
   end of the block instead, `_arrive` finds ``ended/G`` without the watchdog.)
4. On both ranks `GenerationEnd.fails` says which block has failed. Each rank closes its own group, which wakes no other
   rank, and raises a `RankError` out of that block (`_error`), with rank 1's exception in it.
5. A program that catches the error may go on: `initialize_ddp` makes the group again, and the counts of calls and
   barriers begin again.

If rank 1 is killed instead, it writes nothing into the store. Either gloo raises by itself on rank 0, whose main thread
then looks for dead ranks (`_seek_deaths`), or the watchdog of rank 0 sees the death (`Watchdog._death`). In both cases
rank 0 ends the generation.

The death of a worker of a pool, from the kernel to the future of a `submit`:

1. The kernel sends SIGCHLD to the fork server, the parent process of the worker. `_reap` (forkserver) kills the
   processes that the worker had started, and reports the exit to the pool through the socket of the pool.
2. In the thread of the pool, `LocalSite._hear` (site) reads the report with `ServerConnection.receive`
   (forkserver_client). `_worker_exited` takes the answers that the worker sent before its death
   (`WorkerProcess.finish`, worker_process), and calls `Supervisor.exited` (supervisor).
3. If the answer to the task is not among them, `exited` fails the task: `_report_loss` calls `SingleTask.lose` (tasks),
   which completes the future with a `WorkerDiedError`.
4. `_start_missing` (supervisor) asks the fork server for another worker in the same place, through `LocalSite.start`.
   The new worker takes tasks once it has answered `STARTED` and has done the initializer.

A large tensor, as the argument and the result of a `submit`. It is copied twice, once in each direction. A `run` on N
workers makes one copy for all of them, and one for each result:

1. `Pool.submit` (pool) calls `FunctionPacker.pack` (packer), which pickles the call in the thread of the caller. A
   large storage does not go into the pickle: `Pickler` (pickling), the base class of all picklers, writes a number in
   its place, and keeps a view of the memory beside the pickle. The packer then calls `make_payload`, which is `Payload`
   (channel) for local workers. It copies the pickle and all views into a memory file (`fill`, memory_files): that is
   the first copy. Then `submit` returns, and the user may change the tensor.
2. The thread of the pool chooses a worker (`Supervisor.add`, `_hand_out`, `_begin`, supervisor) and gives it the task
   (`WorkerProcess.send`, worker_process). `Channel.flush` sends a packet with the descriptor of the file. The worker
   maps the file (`Channel.receive`, `map_private`), and `loads` (pickling) makes tensors that lie in the map.
3. `TaskRunner._do_calls` (worker) pickles the result in the same way. If the function returns its argument, the view
   keeps the map alive. `_serve` (worker) drops the arguments, and then copies the views into a file of its own: that is
   the second copy. The thread of the pool maps this file (`WorkerProcess._receive`) and finds the task of the answer
   (`Supervisor.answered`, `_task_answered`). `SingleTask.complete` (tasks) rebuilds the result and completes the
   future.
4. The memory of a map is freed with the last tensor in it. The `PackedCall` of a task keeps the payload, and is deleted
   with the task, after all its workers have answered. Then the sender may fill the file again, if no process has it
   open.

A tensor that the user has moved to shared memory is not copied. Its descriptor is sent instead.
"""
