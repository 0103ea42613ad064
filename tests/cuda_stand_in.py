"""A GPU's part in a load, played by memory of this machine: what vLLM's own weight transfer calls, here and in the
engine's process. What is played is PyTorch's CUDA and NCCL's library; vLLM's engines and ours are the real ones."""
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import torch

NCCL = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
typedef struct { char path[128]; } id; /* of a group of two: a pipe */
typedef struct { int rank, pipe; } group;
static int groups;
const char *ncclGetErrorString(int code) { return "it failed"; }
int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclGetUniqueId(id *u) {
    memset(u, 0, sizeof *u);
    snprintf(u->path, 128, "%s/group-%d-%d", getenv("STAND_IN"), getpid(), groups++);
    return mkfifo(u->path, 0600) != 0;
}
int ncclCommInitRank(group **g, int ranks, id u, int rank) {
    if (ranks != 2) return 1;
    *g = malloc(sizeof **g);
    (*g)->rank = rank;
    (*g)->pipe = open(u.path, O_RDWR);
    return (*g)->pipe < 0;
}
int ncclBroadcast(char *from, char *to, size_t n, int type, int root, group *g, void *stream) {
    if (type != 1) return 1;
    for (size_t at = 0; at < n;) {
        ssize_t moved = g->rank == root ? write(g->pipe, from + at, n - at) : read(g->pipe, to + at, n - at);
        if (moved <= 0) return 1;
        at += moved;
    }
    return 0;
}
int ncclAllReduce(void *from, void *to, size_t n, int type, int op, group *g, void *stream) {
    return n != 1 || type != 7 || op != 0;
}
int ncclCommAbort(group *g) { close(g->pipe); free(g); return 0; }
"""
NEVER = ("Reduce AllGather ReduceScatter Send Recv CommDestroy CommSuspend CommResume GroupStart GroupEnd "
         "CommWindowRegister CommWindowDeregister CommQueryProperties").split()


class Stream:
    "A queue that is empty: what is called is done."
    cuda_stream = None
    def __init__(self, device=None): pass
    def synchronize(self): pass


def build(folder):
    "A library with NCCL's names."
    source = NCCL + "".join(f"int nccl{name}(void) {{ return 1; }}\n" for name in NEVER)
    (folder/"nccl.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", folder/"libnccl.so", folder/"nccl.c"], check=True)
    return folder/"libnccl.so"


def exported(bucket):
    "As `reduce_tensor`: what another process opens a tensor with."
    manager, name, n_bytes = bucket.untyped_storage()._share_filename_cpu_()
    return None, (manager, name, n_bytes, None, None, None, 0)


def opened(manager, name, n_bytes, *_):
    "As `rebuild_cuda_tensor`."
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, n_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def names():
    "What CUDA's names in PyTorch are replaced by."
    return {"cuda.get_device_properties": lambda device: SimpleNamespace(uuid="stand-in"), "cuda.Stream": Stream,
            "cuda.current_stream": Stream, "cuda.stream": lambda stream: nullcontext(),
            "cuda.device": lambda device: nullcontext(), "multiprocessing.reductions.rebuild_cuda_tensor": opened,
            "accelerator.current_device_index": lambda: "cpu", "accelerator.device_index": lambda i: nullcontext()}


def put(set_name):
    "Replace them."
    for path, x in names().items():
        where, _, name = path.rpartition(".")
        owner = torch
        for part in where.split("."): owner = getattr(owner, part)
        set_name(owner, name, x)


def serve_trainer(address):
    "The engine's program, on such a machine."
    import vllm.distributed.device_communicators.pynccl as pynccl
    from rlblocks.samplers import child
    put(setattr)
    pynccl.current_stream = Stream
    child.serve_trainer(address)
