"Ranks of a test: processes forked from one that has imported everything, once for all tests of a run, so that a rank costs no imports."
import multiprocessing

from torch.multiprocessing import start_processes

multiprocessing.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.auto.modeling_auto", "rlblocks.models", "rlblocks.fsdp", "tiny"])


def launch(run, args, ranks):
    "run(rank, *args) in `ranks` processes; an error in one ends all and is raised here."
    start_processes(run, args, nprocs=ranks, join=True, start_method="forkserver")
