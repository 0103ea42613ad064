"""Machines on one machine: each has a network, processes and a root folder of its own. Commands with the names of `ssh`
and `rsync` reach them; what those start is started by this process."""
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingMixIn, UnixStreamServer

from conftest import ROOT
from ray_hosts import Hosts, ip
from ray_kills import family

# All of the root is shared but /proc, /dev/shm, /tmp/ray and the folders in $2…, which lie in $1.
BOOT = """
set -e
root=$1/root; mkdir -p "$root" /tmp/ray "$1/ray"; mount -t tmpfs tmpfs "$root"
for x in /*; do
  if [ -L "$x" ]; then cp -d "$x" "$root"; elif [ -d "$x" ] && [ "$x" != /proc ]; then
    mkdir "$root$x"; mount --rbind "$x" "$root$x"; fi
done
mkdir "$root/proc"; mount -t proc proc "$root/proc"
mount -t tmpfs -o size=300m tmpfs "$root/dev/shm"; mount --bind "$1/ray" "$root/tmp/ray"
for x in "${@:2}"; do mkdir -p "$root${x%%=*}"; mount --bind "${x#*=}" "$root${x%%=*}"; done
touch "$1/booted"
exec chroot "$root" bash -c "sleep infinity & wait"     # the first process takes in orphans
"""
CLIENT = """#!{python}
import json, socket, sys
words = sys.argv[1:]
if {copies}:        # rsync … source user@host:target
    host, _, target = words[-1].rpartition("@")[2].partition(":")
    command = f"cp -r {{words[-2]}} {{target}}"
else:
    while words[0].startswith("-"): words = words[2 if words[0] in ("-i", "-o", "-L", "-p") else 1:]
    host, command = words[0].rpartition("@")[2], " ".join(words[1:])
with socket.socket(socket.AF_UNIX) as s:
    s.connect("{address}")
    s.sendall(json.dumps([host, command]).encode() + b"\\n")
    code, text = json.loads(s.makefile().read())
print(text, end="")
sys.exit(code)
"""


class Doors(ThreadingMixIn, UnixStreamServer): daemon_threads = True


class Machines(Hosts):
    "n machines, at the addresses net.1 …; no Ray on them yet. `folders` are theirs: path → where its content lies."
    def __init__(self, n, net="10.0.0", folders=None):
        super().__init__(n, net=net)
        self.folders = folders or {}

    def __enter__(self):
        try:
            self.connect()
            for i in range(self.n): self.boot(i)
            self.tools()
        except BaseException:
            self.__exit__()
            raise
        return self

    def boot(self, i):
        "A way out, as every machine has one: by it Ray finds its address. Then a first process."
        ip("-n", self.host(i), "route", "add", "default", "dev", "to1" if i == 0 else "eth")
        home = self.folder/str(i)
        home.mkdir()
        mounts = []
        for path, content in self.folders.items():
            here = home/path.strip("/").replace("/", "_") if content is None else Path(content)
            here.mkdir(exist_ok=True)
            mounts.append(f"{path}={here}")
        isolated = ["unshare", "--pid", "--fork", "--mount", "--kill-child", "bash", "-c", BOOT, "boot", str(home)]
        self.running.append(self.run(i, [*isolated, *mounts], out=self.folder/f"boot-{i}.txt"))
        for _ in range(200):
            if (home/"booted").exists(): return
            time.sleep(.05)
        raise RuntimeError((self.folder/f"boot-{i}.txt").read_text())

    def tools(self):
        "`ssh` and `rsync`; `pip`, as the machines have what it would install."
        tools = self.folder/"tools"
        tools.mkdir()
        for name in ("ssh", "rsync"):
            (tools/name).write_text(CLIENT.format(python=sys.executable, copies=name == "rsync",
                                                  address=self.folder/"door"))
        (tools/"pip").write_text(f'#!/bin/sh\necho "$@" >> {self.folder}/installed.txt\n')
        for tool in tools.iterdir(): tool.chmod(0o755)
        path = f"{tools}:{Path(sys.executable).parent}"
        for i in range(self.n): (self.folder/str(i)/".bashrc").write_text(
            f"export PATH={path}:/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH={ROOT/'tests'}:{ROOT} "
            "RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1\n")
        machines = self

        class Door(StreamRequestHandler):
            def handle(self):
                address, command = json.loads(self.rfile.readline())
                self.wfile.write(json.dumps(machines.on(int(address.rpartition(".")[2]) - 1, command)).encode())

        self.doors = Doors(str(self.folder/"door"), Door)
        threading.Thread(target=self.doors.serve_forever, daemon=True).start()

    def first(self, i):
        "The first process of a machine: the child of the one that made its namespaces."
        (found,) = [pid for (pid, _), name in family(self.running[i].pid).items() if name == "sleep"]
        return found

    def start(self, i, command, out, **env):
        "A command on a machine, as of somebody who has just come there."
        given = dict(HOME=str(self.folder/str(i)), USER="root", PATH="/usr/sbin:/usr/bin:/sbin:/bin") | env
        inside = ["nsenter", f"--target={self.first(i)}", "--net", "--pid", "--mount", "--root", "--wd", "env", "-i",
                  *(f"{k}={x}" for k, x in given.items()), "bash", "-c", command]
        with out.open("w") as f: return subprocess.Popen(inside, stdin=subprocess.DEVNULL, stdout=f, stderr=f)

    def on(self, i, command, **env):
        "Run it to its end: (exit code, what it said)."
        out = self.folder/f"{i}-{time.monotonic_ns()}.txt"
        return self.start(i, command, out, **env).wait(), out.read_text(errors="replace")

    def ray(self, i):
        "Ray's own processes on a machine that make it a node of a cluster."
        lines = [x.split()[0].rpartition("/")[2] for x in self.on(i, "ps -eo args")[1].splitlines()[1:]]
        return [x for x in lines if x in ("raylet", "gcs_server") or x.startswith("ray::")]

    def __exit__(self, *error):
        if hasattr(self, "doors"): self.doors.shutdown()
        super().__exit__(*error)
