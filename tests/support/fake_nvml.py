"""A stand-in for NVML with made-up GPUs, behind the functions of it that the package calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

NVML_TEMPERATURE_GPU = 0
MIB = 1 << 20


class NVMLError(Exception):
    """What NVML raises when it refuses."""


class Nvml:
    """As the module ``pynvml``. ``gpus`` holds what each tells; a query whose name is not there is refused."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = NVML_TEMPERATURE_GPU

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = list(gpus)
        self.users = 0

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.users > 0
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        """Return a slice, by its whole UUID."""
        for gpu in self.gpus:
            for each in gpu.get("slices", []):
                if each["uuid"] == uuid:
                    return each
        raise NVMLError("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: dict[str, Any]) -> dict[str, Any]:
        return next(gpu for gpu in self.gpus if part in gpu.get("slices", []))

    def nvmlDeviceGetUUID(self, gpu: dict[str, Any]) -> str:
        uuid: str = gpu["uuid"]
        return uuid

    def nvmlDeviceGetName(self, gpu: dict[str, Any]) -> Any:
        return self._told(gpu, "name")

    def nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any]) -> Any:
        total, free = self._told(gpu, "memory")
        return SimpleNamespace(total=total * MIB, free=free * MIB)

    def nvmlDeviceGetUtilizationRates(self, gpu: dict[str, Any]) -> Any:
        return SimpleNamespace(gpu=self._told(gpu, "utilization"))

    def nvmlDeviceGetTemperature(self, gpu: dict[str, Any], sensor: int) -> Any:
        assert sensor == NVML_TEMPERATURE_GPU
        return self._told(gpu, "temperature")

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: dict[str, Any]) -> Any:
        return [SimpleNamespace(pid=pid) for pid in self._told(gpu, "processes")]

    def _told(self, gpu: dict[str, Any], what: str) -> Any:
        if what not in gpu:
            raise NVMLError("Not Supported")
        return gpu[what]


def gpu(number: int, free: int, utilization: int = 0) -> dict[str, Any]:
    """One that tells everything."""
    return {
        "uuid": f"GPU-{number}{number}ab-{number}",
        "name": "NVIDIA Test",
        "memory": (80_000, free),
        "utilization": utilization,
        "temperature": 40 + number,
        "processes": [100 + number],
    }


def install(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, Any]) -> Nvml:
    """Have ``import pynvml`` give a machine with these."""
    nvml = Nvml(*gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml
