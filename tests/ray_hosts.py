"""Hosts on one machine: network namespaces, a Ray node in each, a token for all of them.

python tests/ray_hosts.py ADDRESS FOLDER     # the driver, in the first host"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from conftest import RAY_TOKEN, ROOT
from ray_kills import end, family
from rlblocks.engines.process_group import RankLost
from rlblocks.placement.doctor import HEALTH


def why_not():
    "Why no namespace can be made here; None: it can."
    if os.geteuid() != 0: return "network namespaces need root"
    if shutil.which("ip") is None: return "network namespaces need `ip`"
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode: return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name])
    return None


def ip(*words): subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Hosts:
    "n hosts; the first one has the head of the cluster and the driver."
    def __init__(self, n, port=6379, net="10.88.0"):
        self.tag, self.n, self.port, self.net, self.running = f"{os.getpid() % 46656:x}", n, port, net, []
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))
        self.env = {k: x for k, x in os.environ.items() if not k.startswith("RAY_")} | HEALTH | RAY_TOKEN | dict(
            RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
            PYTHONPATH=f"{ROOT/'tests'}{os.pathsep}{ROOT}")

    def host(self, i): return f"rl{self.tag}{i}"
    def address(self, i): return f"{self.net}.{i + 1}"

    def __enter__(self):
        try:
            self.connect()
            for i in range(self.n): self.start(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def connect(self):
        "A line from the first host to each of the others; it passes on what they say to each other."
        for i in range(self.n): ip("netns", "add", self.host(i))
        for i in range(self.n): ip("-n", self.host(i), "link", "set", "lo", "up")
        ip("netns", "exec", self.host(0), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for i in range(1, self.n):
            near, far = ("-n", self.host(0)), ("-n", self.host(i))
            ip("link", "add", "eth", "netns", self.host(i), "type", "veth", "peer", "name", f"to{i}", "netns",
               self.host(0))
            ip(*near, "addr", "add", f"{self.address(0)}/32", "dev", f"to{i}")
            ip(*far, "addr", "add", f"{self.address(i)}/32", "dev", "eth")
            ip(*near, "link", "set", f"to{i}", "up")
            ip(*far, "link", "set", "eth", "up")
            ip(*near, "route", "add", f"{self.address(i)}/32", "dev", f"to{i}")
            ip(*far, "route", "add", f"{self.address(0)}/32", "dev", "eth")
            ip(*far, "route", "add", f"{self.net}.0/24", "via", self.address(0))

    def start(self, i):
        "A node of the cluster."
        common = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block",
                  f"--node-ip-address={self.address(i)}", f"--temp-dir={self.folder/str(i)}"]
        role = ["--head", f"--port={self.port}", "--include-dashboard=false"] if i == 0 else [
            f"--address={self.address(0)}:{self.port}"]
        ray = [str(Path(sys.executable).parent/"ray"), "start", *role, *common]
        self.running.append(self.run(i, ray, out=self.folder/f"node-{i}.txt"))
        if i == 0: self.wait_for_port()

    def wait_for_port(self):
        try_it = (f"import socket, time\nfor _ in range(600):\n  try: socket.create_connection(('{self.address(0)}', "
                  f"{self.port}), 1); break\n  except OSError: time.sleep(.1)\nelse: raise SystemExit(1)")
        assert self.run(0, [sys.executable, "-c", try_it]).wait(90) == 0, (self.folder/"node-0.txt").read_text()

    def run(self, i, command, out=None, **env):
        "A process in a host."
        out = open(out, "w") if out else subprocess.DEVNULL
        return subprocess.Popen(["ip", "netns", "exec", self.host(i), *command], env=self.env | env, cwd=ROOT,
                                stdout=out, stderr=subprocess.STDOUT)

    def cut(self, i):
        "Pull the plug of a host."
        ip("-n", self.host(0), "link", "set", f"to{i}", "down")

    def join(self, i):
        "Put it in again."
        ip("-n", self.host(0), "link", "set", f"to{i}", "up")
        ip("-n", self.host(0), "route", "replace", f"{self.address(i)}/32", "dev", f"to{i}")

    def __exit__(self, *error):
        for process in self.running: end(family(process.pid))
        for process in self.running: process.wait()
        for i in range(self.n): subprocess.run(["ip", "netns", "del", self.host(i)], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


# -- the driver

def loops(pool, folder=None, steps=3):
    "GRPO and, without a folder for saves, PPO."
    import spmd_loops
    from rlblocks import Checkpoint, Prompts, loop_from
    grpo, ppo = (loop_from(f"{ROOT}/tutorials/{name}.ipynb:{name}") for name in ("grpo", "ppo"))
    how = dict(model=spmd_loops.net, engine=spmd_loops.steadily, micro_tokens=64, minibatches=2, max_tokens=4)
    def data(): return Prompts(spmd_loops.ASKED, spmd_loops.Digits())
    if folder:
        return grpo(pool, data(), spmd_loops.prefers, prompts=4, group_size=3, steps=steps,
                    checkpoint=Checkpoint(folder, every=1), **how)
    shown = lambda rows: [{k: float(v) for k, v in row.items()} for row in rows]
    return dict(grpo=shown(grpo(pool, data(), spmd_loops.prefers, prompts=4, group_size=3, steps=steps, **how)),
                ppo=shown(ppo(pool, data(), spmd_loops.prefers, critic_model=lambda: spmd_loops.net(seed=1).model,
                              prompts=5, steps=steps, **how)))


class Unlucky:
    "On the ranks; one of them dies with a last word."
    def dies(self, n):
        if os.environ["RANK"] != str(n): return
        print("out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def last_words(pool, address):
    "What is said of a rank that dies on another host than the driver's."
    far = next(rank.number for rank in pool.processes.ranks if rank.address != address)
    try: pool.place(Unlucky).dies(far)
    except RankLost as e: return str(e)


def drive(address, folder):
    "Both loops over three hosts, then GRPO until one of them is gone, and on with what is left."
    import torch
    from rlblocks import Cluster, RayPool, restarted
    torch.set_num_threads(1)
    cluster = Cluster(address=address, ready=20., options=dict(_node_ip_address=address.split(":")[0],
                                                               logging_level="ERROR", log_to_driver=False))
    def pool(nodes): return RayPool(nodes, nodes=nodes, cluster=cluster, timeout=120., grace=2.)
    def say(**what): print(json.dumps(what | dict(at=time.time())), flush=True)
    def run(pool):
        yield from loops(pool, Path(folder)/"run", 12)
        say(died=last_words(pool, address.split(":")[0]))       # on what is left
    warnings.showwarning = lambda message, *rest, **more: say(warning=str(message))
    three = pool(3)
    say(nodes=sorted(rank.address for rank in three.processes.ranks))
    say(loops=loops(three))
    try:
        for row in restarted(run, [lambda: three if three.calls.broken is None else pool(3), lambda: pool(2)],
                             restarts=2):
            say(row={k: float(v) for k, v in row.items()})
            if row["step"] == 4:
                Path(folder, "cut").touch()
                time.sleep(1)
    except Exception as e: say(error=f"{type(e).__name__}: {e}")
    say(end=True)


if __name__ == "__main__": drive(*sys.argv[1:])
