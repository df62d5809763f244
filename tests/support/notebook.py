"""A real Jupyter kernel for tests. As a script: runs the cells that stand as JSON in its input, and answers with JSON.

A cell that begins with ``# stop`` is interrupted as soon as it prints something, as by the notebook's stop button.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any


def run_cells(*cells: str) -> list[tuple[str, str | None]]:
    """What each cell prints, with ⟦what it displays⟧, and the name of what it raises; all of them in one kernel."""
    # In a process of its own, because the client leaves an event loop open.
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(cells), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout.splitlines()[-1])]


def _main() -> None:
    from jupyter_client.manager import KernelManager

    with tempfile.TemporaryDirectory() as folder:
        manager = KernelManager(transport="ipc", ip=f"{folder}/kernel")
        manager.start_kernel()
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            print(json.dumps([_run_cell(manager, client, cell) for cell in json.load(sys.stdin)]))
        finally:
            client.stop_channels()
            manager.shutdown_kernel()


def _run_cell(manager: Any, client: Any, code: str) -> tuple[str, str | None]:
    printed, error = "", None
    request = client.execute(code)
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            printed += f"⟦{content['data']['text/plain']}⟧"
        elif message["msg_type"] == "stream":
            printed += content["text"]
            if code.startswith("# stop"):
                manager.interrupt_kernel()
        elif message["msg_type"] == "error":
            error = content["ename"]
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return printed, error


if __name__ == "__main__":
    _main()
