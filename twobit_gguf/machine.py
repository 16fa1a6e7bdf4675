"""The machine: its CPU's name, and how many threads and cores of it this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(names, platform.machine())


def usable_cpus() -> set[int]:
    """The CPUs (hardware threads) that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Cores this process may use, counting two threads of one core once."""
    cores = set()
    for cpu in usable_cpus():
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return max(len(cores), 1)


def describe() -> str:
    """Both, for the head of a table: "AMD EPYC, 2 threads"."""
    return f"{cpu_name()}, {len(usable_cpus())} threads"
