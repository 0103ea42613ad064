"""An interpreter that has its libraries already: a program then starts in a tenth of a second instead of ten.

`Ready(python, modules)` starts a process of that interpreter that only imports, and gives the path of a command that
stands for it: `command -c CODE …`, `command -m MODULE …`, `command FILE …`. What the command is asked to run is run in
a fork of that process, with the command's arguments, variables, folder and streams; the command ends as the fork does,
and the fork ends when the command is killed. As in tests/forked.py a fork is safe there: one thread, nothing computed.

A variable that libraries read when they are imported must be what it was then. Where it is not, for a flag that is not
known here, and where the libraries cannot be imported, the command becomes the interpreter itself. A signal to the
command is for the command alone: `behind(command, pid)` is the process that does its work."""
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

# what an engine of vLLM imports from its start to its first token
VLLM = """vllm vllm.entrypoints.llm vllm.entrypoints.launchers.cli_args vllm.v1.engine.core vllm.v1.engine.llm_engine
vllm.v1.executor.uniproc_executor vllm.v1.worker.cpu_worker vllm.v1.worker.cpu_model_runner vllm.v1.core.sched.scheduler
vllm.v1.attention.backends.cpu_attn vllm.model_executor.models.llama vllm.model_executor.models.qwen2
vllm.model_executor.models.qwen3_moe vllm.model_executor.layers.quantization.online.base vllm.plugins.lora_resolvers
torch._inductor.compile_fx torch._inductor.codegen.cpp torch._inductor.scheduler torch._subclasses.schema_check_mode
jaxtyping loguru compressed_tensors""".split()

# what a rank of Ray imports before its first call, but for Ray, whose threads no fork would have
RANK = """torch torch.distributed.fsdp torch.distributed.checkpoint torch.distributed.tensor.parallel torch._dynamo
transformers.models.auto.modeling_auto transformers.models.llama.modeling_llama pytest rlblocks.models.policy
rlblocks.models.critic rlblocks.models.scorer rlblocks.rollout.rollout rlblocks.checkpoint.checkpoint
rlblocks.engines.fsdp2 rlblocks.engines.tensor_parallel rlblocks.placement.spmd""".split()

READ_AT_IMPORT = ("VLLM_", "MKL_", "ATEN_", "TORCH_", "RAY_AUTH", "PYTHONHASHSEED", "HF_")
COMMAND = """#!{python} -IS
import json, os, socket, sys
flags, rest = [], sys.argv[1:]
while rest and rest[0] in ("-P", "-u", "-B"): flags.append(rest.pop(0))
now = {{k: x for k, x in os.environ.items() if k.startswith({names!r})}}
def itself(): os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if now != {then!r} or not rest or (rest[0][:1] == "-" and rest[0] not in ("-c", "-m")): itself()
with socket.socket(socket.AF_UNIX) as s:
    try: s.connect({address!r})
    except OSError: itself()        # it could not import
    asked = json.dumps([flags, rest, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(s, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    s.sendall(asked)
    for fd in (0, 1, 2): os.close(fd)
    said = s.recv(8)
code = int(said or b"1")
if code < 0: os.kill(os.getpid(), -code)
os._exit(code)
"""


def read_at_import(environment):
    "Of a process's variables."
    return {k: x for k, x in environment.items() if k.startswith(READ_AT_IMPORT)}


class Ready:
    "A process that has the modules, and `command`, which stands for its interpreter and waits until it has them."
    def __init__(self, python, modules, environment=os.environ):
        self.folder = tempfile.TemporaryDirectory(prefix="ready-")
        address, self.command = f"{self.folder.name}/socket", f"{self.folder.name}/python"
        with socket.socket(socket.AF_UNIX) as listener:     # whoever asks before it has imported waits there
            listener.bind(address)
            listener.listen(64)
            self.process = subprocess.Popen([python, __file__, str(listener.fileno()), *modules],
                                            env=dict(environment, OMP_NUM_THREADS="1"),   # or numpy has threads
                                            stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        Path(self.command).write_text(COMMAND.format(python=python, names=READ_AT_IMPORT, address=address,
                                                     then=read_at_import(environment)))
        os.chmod(self.command, 0o755)

    def close(self):
        "End it, and what it runs."
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def behind(command, pid):
    "The process that does a command's work: the command's own where it has become the interpreter."
    file = Path(command).parent/str(pid)
    return int(file.read_text()) if file.exists() else pid


# -- in the process that imports

class Server:
    "Forks for whoever asks, until standard input is closed."
    def __init__(self, listener):
        self.listener, self.selector, self.running = listener, selectors.DefaultSelector(), {}
        self.watch(listener, self.begin)
        self.watch(0, self.end)

    def watch(self, what, then): self.selector.register(what, selectors.EVENT_READ, then)

    def serve(self):
        while True:
            for key, _ in self.selector.select(): key.data(key.fileobj)

    def begin(self, listener):
        "A command has been started."
        connection, _ = listener.accept()
        size, fds, *_ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as file: asked = json.loads(file.read(int.from_bytes(size, "big")))
        if (pid := os.fork()) == 0:
            for other in (self.listener, connection, self.selector, *self.running.values()): other.close()
            become(fds, *asked)
        for fd in fds: os.close(fd)
        number, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        file = Path(listener.getsockname()).parent/str(number)
        file.write_text(str(pid))
        self.running[pid] = connection
        self.watch(connection, lambda _: self.let_go(pid))
        self.watch(os.pidfd_open(pid), lambda fd: self.tell(pid, fd, file))

    def let_go(self, pid):
        "The command is gone, and its work ends."
        self.selector.unregister(self.running[pid])
        os.kill(pid, signal.SIGKILL)

    def tell(self, pid, fd, file):
        "The work is done, and the command ends as it has."
        code, connection = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), self.running.pop(pid)
        if connection in self.selector.get_map(): self.selector.unregister(connection)
        self.selector.unregister(fd)
        os.close(fd)
        file.unlink(missing_ok=True)
        with connection, contextlib.suppress(OSError): connection.sendall(str(code).encode())

    def end(self, _):
        for pid in self.running: os.kill(pid, signal.SIGKILL)
        os._exit(0)


def become(fds, flags, rest, environment, folder):
    "A command's work, in a fork, to its end."
    for to, fd in enumerate(fds):
        os.dup2(fd, to)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, how, closefd=False) for fd, how in enumerate("rww"))
    os.environ.clear(), os.environ.update(environment)
    os.chdir(folder)
    own = [] if "-P" in flags else [""] if rest[0] in ("-c", "-m") else [str(Path(rest[0]).parent)]
    sys.path[:] = own + paths(environment) + [p for p in sys.path[1:] if p not in paths(GIVEN)]
    try: code = run(rest)
    except SystemExit as e: code = e.code
    except BaseException as e:
        sys.last_value = e      # as an interpreter does: what runs at exit reads it
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None): code = print(code, file=sys.stderr) or 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError): stream.flush()
    os._exit(code or 0)


def run(rest):
    "As an interpreter runs what stands behind its flags."
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif rest[0] == "-c":
        sys.argv, sys.modules["__main__"] = ["-c", *rest[2:]], types.ModuleType("__main__")
        exec(compile(rest[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")


def paths(environment): return [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]


if __name__ == "__main__":
    GIVEN = dict(os.environ)
    for name in sys.argv[2:]: importlib.import_module(name)
    gc.collect()
    gc.freeze()         # a program's garbage collections look at its own objects
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread"
    Server(socket.socket(fileno=int(sys.argv[1]))).serve()
