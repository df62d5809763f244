"""The first lines of the fork server, run as a script: they watch the parent while the server still imports torch."""

from __future__ import annotations

import json
import os
import select
import sys
import threading


def main(control_fd: int, parent_pid: int, path: list[str]) -> None:
    """Serve, with ``path`` for ``sys.path``; if the parent ends before that can begin, end at once."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return
    loaded, stop = os.pipe()

    def guard() -> None:
        ready, _, _ = select.select([parent, loaded], [], [])
        if parent in ready:
            os._exit(1)

    guarding = threading.Thread(target=guard)
    guarding.start()
    sys.path[:] = path
    from nn_parallel._engine.pool.forkserver import serve

    os.close(stop)
    guarding.join()  # before the first fork
    os.close(loaded)
    serve(control_fd, parent_pid, parent)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
