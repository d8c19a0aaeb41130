"""Let glibc's heap keep what training on a CPU frees: the next step allocates the same tensors
again. Torch-free.

By default glibc returns large blocks to the system, which hands them out again page by page, filled
with zeros. Every page of every step's tensors is then a page fault. On a GPU it would only cost
memory: the tensors are not in this heap.

A user's own choice stays: variables MALLOC_…, GLIBC_TUNABLES, or another allocator by LD_PRELOAD.
"""

import ctypes
import os
import sys

# glibc 2.35 asks for transparent huge pages; earlier versions ignore it
HUGE_PAGES = "glibc.malloc.hugetlb=1"
MIB = 1 << 20
SETTINGS = {  # by variable: the number of mallopt's parameter, and its value
    # bytes from which a block is a mapping of its own: mallopt's maximum
    "MALLOC_MMAP_THRESHOLD_": (-3, 2**31 - 1),
    # bytes free at the heap's end from which they are returned: never
    "MALLOC_TRIM_THRESHOLD_": (-1, -1),
    "MALLOC_TOP_PAD_": (-2, 64 * MIB),  # bytes by which the heap grows beyond what is needed
}
OLD_MMAP_LIMIT = (-3, 32 * MIB)  # the highest that glibc before 2.35 takes


def keep_freed_memory(accelerator: str) -> None:
    """Set this process's heap to keep freed memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None or not _may_set(accelerator):
        return
    for number, value in (OLD_MMAP_LIMIT, *SETTINGS.values()):
        mallopt(number, value)


def rank_variables(accelerator: str) -> dict[str, str]:
    """Return the variables for ranks that this process starts: glibc reads some settings only when
    a process starts.
    """
    return {"GLIBC_TUNABLES": HUGE_PAGES} if _may_set(accelerator) else {}


def _may_set(accelerator: str) -> bool:
    """Return whether the heap is ours to set: on Linux, for a CPU, and if the environment does not
    say how to allocate, other than by `rank_variables`.
    """
    chosen = os.environ.get("LD_PRELOAD"), os.environ.get("GLIBC_TUNABLES", "")
    by_user = chosen[0] or chosen[1] not in ("", HUGE_PAGES)
    by_user = by_user or any(name.startswith("MALLOC_") for name in os.environ)
    return accelerator == "cpu" and sys.platform == "linux" and not by_user
