"""A GPU's part in a load, played by memory of this machine: what vLLM's own weight transfer calls, here and in the
engine's process. What is played is PyTorch's CUDA; vLLM's engine and ours are the real ones."""
from contextlib import nullcontext
from types import SimpleNamespace

import torch

class Stream:
    "A queue that is empty: what is called is done."
    cuda_stream = None
    def __init__(self, device=None): pass
    def synchronize(self): pass


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


def serve_trainer(connection, folder):
    "The engine's program, on such a machine."
    from rlblocks.samplers import vllm_process
    put(setattr)
    vllm_process.serve_trainer(connection, folder)
