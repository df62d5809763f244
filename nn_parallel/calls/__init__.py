"""What ranks do together: calls that one rank runs, blocks that all run, and how a failure reaches all of them.

A block that fails: on the failing rank `Blocks.block` catches the exception, and `_fail` writes it under ``ended/G``.
On each other rank `Watcher._loop` reads that, `_free` gets the main thread out of what it sits in, and the same `_fail`
makes the `RankError` of what is written. All begin a new generation.

A call that fails: the rank that runs it writes ``failures/R``, then its report; the others, which poll the report, read
the failure and raise the `RankError` of it. Neither the process group nor the generation changes.
"""
