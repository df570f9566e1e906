"""How much memory a device has left for pools; knows nothing of models."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")


def available_bytes(device: torch.device) -> int:
    """Free memory now, on CUDA without what torch's own cache holds back.

    On CPU what the kernel could give without swapping, and no more than the process's control
    group may still take: in a container the machine's figure would be the wrong one.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    machine = int(psutil.virtual_memory().available)
    return min([machine, *_cgroup_headrooms()])


def _cgroup_headrooms() -> list[int]:
    """What each limited control group (version 2) above this process has left, in bytes."""
    try:
        lines = CGROUP_OF_SELF.read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    folder = CGROUP_ROOT / own.strip("/")
    headrooms = []
    for level in (folder, *folder.parents):
        if not level.is_relative_to(CGROUP_ROOT):
            break
        headroom = _headroom(level)
        if headroom is not None:
            headrooms.append(headroom)
    return headrooms


def _headroom(folder: Path) -> int | None:
    """Limit minus use; file pages that can be dropped count as free. None = no limit known."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        fields = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        droppable = {name: int(value) for name, value in fields}.get("inactive_file", 0)
        return None if limit == "max" else max(int(limit) - used + droppable, 0)
    except (OSError, ValueError):
        return None
