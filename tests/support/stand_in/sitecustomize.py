"""With this folder in PYTHONPATH, torch finds in each Python process two accelerators: see stand_in_accelerator.py."""

import stand_in_accelerator
import torch
import torch.distributed as dist

torch.utils.rename_privateuse1_backend("stand_in")
torch._register_device_module("stand_in", stand_in_accelerator)
dist.Backend.register_backend("stand_in_ccl", stand_in_accelerator.make, devices=["cpu", "stand_in"])
for name in ("current_device_index", "set_device_index", "synchronize"):
    setattr(torch.accelerator, name, getattr(stand_in_accelerator, name))
torch.accelerator.memory.empty_cache = stand_in_accelerator.empty_cache
torch.accelerator.is_available = lambda: True
torch.accelerator.device_count = lambda: 2
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("stand_in")
torch._C._get_accelerator = lambda check=None: torch.device("stand_in")
