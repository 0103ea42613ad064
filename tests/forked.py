"""Ranks of a test, forked from one process that has imported everything: a rank then starts in a tenth of a second instead of five.

A fork is safe there because that process only imports: it has started no thread, computed nothing and opened no group."""
import multiprocessing

from torch.multiprocessing import start_processes

multiprocessing.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel", "transformers.models.auto.modeling_auto",
                                        "rlblocks.models.policy", "rlblocks.engines.fsdp", "rlblocks.engines.zero", "rlblocks.engines.tensor", "rlblocks.checkpoint.checkpoint", "tiny"])


def forked(run, args, ranks):
    "run(rank, *args) in so many processes; an error in one ends all of them and is raised here."
    start_processes(run, args, nprocs=ranks, join=True, start_method="forkserver")
