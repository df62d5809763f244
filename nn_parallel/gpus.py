"""The GPUs of this machine: list them, select some, parse a selection. Nothing here initializes CUDA."""

from __future__ import annotations

from ._engine.gpus import GPU, parse_selection, read_gpus, take_gpus

__all__ = ["GPU", "list_gpus", "parse_gpu_selection", "select_gpus"]

GPU.__module__ = __name__  # its public place, which its repr and pickles name


def list_gpus() -> list[GPU]:
    """Every NVIDIA GPU of this machine, in NVML's order; an empty list, and one line in the log, where none can be had.

    Example::

        for gpu in list_gpus():
            print(gpu.index, gpu.name, gpu.memory_free_mb, "MiB free")
    """
    return read_gpus()


def parse_gpu_selection(selection: str) -> list[GPU]:
    """The GPUs that ``"0,2-3"`` (a range includes its end), ``"all"`` or ``"GPU-1a2b,GPU-3c"`` name, in that order.

    Numbers are those of `list_gpus`; a UUID may be abbreviated. All means those that ``CUDA_VISIBLE_DEVICES`` shows.

    Raises:
        ValueError: one of them does not exist, is hidden, ambiguous or named twice; the message says what there is.

    Example::

        chosen = parse_gpu_selection("0,2-3")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in chosen)  # before anything starts CUDA
    """
    return parse_selection(selection)


def select_gpus(count: int, *, min_memory_mb: int = 0) -> list[GPU]:
    """Take the ``count`` GPUs with the most free memory, of equal ones the least busy, for the life of this process.

    Another process on this machine that selects so too, of whichever user, does not get them meanwhile: a lock on a
    file for each UUID, in the folder for temporary files, says so. Of those that this process has already, it gets the
    same again.

    Args:
        min_memory_mb: so many MiB must be free on each.

    Raises:
        ValueError: ``count`` is below one.
        LaunchError: there are fewer such GPUs; the message says what is the matter with the others. Or a lock's file
            cannot be read.

    Example::

        chosen = select_gpus(2, min_memory_mb=6000)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in chosen)  # before anything starts CUDA
    """
    return take_gpus(count, min_memory_mb)
