"What a process holds, by the kernel's own account."
import ctypes
import gc

import torch
import torch.distributed as dist


def memory(what):
    "MiB of this process: VmRSS now, VmHWM at most."
    return next(int(line.split()[1])/1024 for line in open("/proc/self/status") if line.startswith(what))


def give_back():
    """From now on what is freed leaves the resident set at once; a process that measures says so before it makes
    anything large."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)          # M_MMAP_THRESHOLD


def settled():
    "MiB of this process once nothing is held that is of no use; all ranks together."
    # each of gloo's threads keeps the tensors of its last collective until it has another: a few small ones
    if dist.is_initialized():
        for work in [dist.all_reduce(torch.zeros(1), async_op=True) for _ in range(16)]: work.wait()
    gc.collect()
    return memory("VmRSS")


def export_extra(export, bucket_bytes):
    """MiB that an export in buckets of so many bytes holds at its highest beyond what was there. The least of three:
    a thread that is late in letting go comes on top, now and then."""
    def once(size):
        before = settled()
        open("/proc/self/clear_refs", "w").write("5")
        for bucket in export(size): del bucket
        return memory("VmHWM") - before
    once(1 << 20)                                   # the collectives' own buffers are there from now on
    return min(once(bucket_bytes) for _ in range(3))
