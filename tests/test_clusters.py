"""The files that start Ray on one host, over SSH, under Slurm and on Kubernetes: what they say, and those that can be
started here, started."""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from ray_hosts import Hosts, end, family, why_not
from ray_machines import Machines

FILES = ROOT/"tutorials"/"clusters"
PATHS = dict(PYTHONPATH=os.pathsep.join([str(ROOT/"tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
             PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")


@pytest.mark.parametrize("file", sorted(f.name for f in FILES.iterdir()))
def test_each_file_takes_care_of_all(file):
    "A token, health checks as `rlblocks doctor` wants them, the store and what it has no room for, the run's folder."
    from rlblocks.placement.doctor import HEALTH
    text = (FILES/file).read_text()
    for name, value in HEALTH.items(): assert re.search(rf'{name}(=|, value: "){value}\b', text), name
    assert re.search(r"RAY_AUTH_MODE=token|authOptions:\s+mode: token", text)
    for word in ("/dev/shm", "object-spilling-directory"): assert word in text
    assert re.search(r"/runs|Saves|checkpoint", text) and not re.search(r"ray stop(?!`)", text)
    assert not any(len(line) > 120 for line in text.splitlines())


@pytest.mark.parametrize("file", ["one_host.sh", "slurm.sh"])
def test_scripts_are_bash(file):
    assert subprocess.run(["bash", "-n", FILES/file], capture_output=True, text=True).stderr == ""


def test_a_job_of_slurm_outlives_its_tasks_and_not_its_nodes():
    """A site's KillOnBadExit and WaitTime would end the step with the first Ray that ends. A job with --no-kill is not
    requeued when its first node is lost, and that node has the loop."""
    text = (FILES/"slurm.sh").read_text()
    assert re.search(r"^srun --kill-on-bad-exit=0 --wait=0 ray symmetric-run", text, re.M)
    assert re.search(r"^#SBATCH .*--requeue", text, re.M) and not re.search(r"^(#SBATCH|srun) .*--no-kill", text, re.M)


@pytest.mark.parametrize("wanted, there, same", [
    ("head:6379", "10.0.0.1:6379", True), ("head:6379", "10.0.0.1:6380", False), ("head:6379", "10.9.9.9:6379", True),
    ("far:6379", "10.0.0.1:6379", False), ("far:6379", "10.0.0.7:6379", True), ("nobody:6379", "nobody:6379", True),
    ("nobody:6379", "10.0.0.1:6379", False), ("auto", "10.0.0.1:6379", True)])
def test_a_second_pool_is_on_the_cluster_of_the_first(monkeypatch, wanted, there, same):
    "Where the head's own name is 127.0.1.1, as Debian has it, and where a name means nothing."
    from rlblocks.placement.cluster import check_address
    known = {"head": "127.0.1.1", "far": "10.0.0.7"}
    def address(host):
        if host in known or host[0].isdigit(): return known.get(host, host)
        raise socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(socket, "gethostbyname", address)
    if same: return check_address(wanted, there)
    says = f"asked for the cluster at {wanted}, but this process is connected to {there}"
    with pytest.raises(ValueError, match=says): check_address(wanted, there)


@needs_ray
def test_ray_up_takes_its_file():
    "Ray's own schema, and the commands of both kinds of nodes."
    from ray.autoscaler._private.util import prepare_config, validate_config
    config = prepare_config(yaml.safe_load((FILES/"ssh.yaml").read_text()))
    validate_config(config)
    for kind in ("head", "worker"):
        (line,) = config[f"{kind}_start_ray_commands"]
        said = subprocess.run(["bash", "-nc", line], capture_output=True, text=True)
        assert said.returncode == 0 and known_options(line), said.stderr
    assert set(config["file_mounts"]) == {"~/.ray/auth_token"} and config["setup_commands"][0].startswith("chmod 600")
    with pytest.raises(Exception, match="max_wrkers"): validate_config(config | dict(max_wrkers=2))


def known_options(line):
    "Whether `ray start` knows each option of a line."
    from ray.scripts.scripts import start
    known = {name for p in start.params for name in p.opts}
    return {x.partition("=")[0] for x in line.split() if x.startswith("--")} <= known


ON_THE_HEAD = """
import os
import socket
import sys
import time
import ray

def alive(n, seconds):
    end = time.monotonic() + seconds
    while (found := sum(x["Alive"] for x in ray.nodes())) != n and time.monotonic() < end: time.sleep(.2)
    print(f"nodes: {found}", flush=True)

class Sums:
    def over_ranks(self):
        import torch
        import torch.distributed as dist
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item(), os.environ.get("RAY_health_check_period_ms")

if __name__ == "__main__":
    ray.init("auto", logging_level="ERROR", log_to_driver=False)
    for n in map(int, sys.argv[1:]): alive(n, 150)
    if len(sys.argv) == 2:
        from rlblocks import RayPool
        from rlblocks.placement.doctor import doctor
        print("doctor:", doctor(["--cluster", "auto", "--folder", "/runs"]))
        with RayPool(3, cpus=.5, nodes=3, cluster="auto", timeout=120.) as pool:
            print("ranks on", *sorted(rank.address for rank in pool.processes.ranks), pool.place(Sums).over_ranks())
"""


@needs_ray
@pytest.mark.ranks
@pytest.mark.long
def test_machines_that_ray_up_reaches(tmp_path):
    """`ssh.yaml` as it stands but for the size of the store: three machines, of which `ray up` starts one, and that one
    the others. `rlblocks doctor --cluster` finds nothing wrong; a pool spans them; a machine that was cut off comes
    back with a new Ray; `ray down` ends all."""
    if why := why_not(): pytest.skip(why)
    (runs := tmp_path/"runs").mkdir()
    home, text = laptop(tmp_path/"laptop"), (FILES/"ssh.yaml").read_text().replace("32000000000", "100000000")
    (home/"ssh.yaml").write_text(text)
    (runs/"on_the_head.py").write_text(ON_THE_HEAD)
    with Machines(3, folders={"/runs": runs, "/scratch": None}) as machines:
        def ray(*words):
            env = dict(HOME=str(home), PATH=f"{machines.folder/'tools'}:{PATHS['PATH']}", RAY_TMPDIR=str(home),
                       PYTHONPATH=PATHS["PYTHONPATH"], RAY_USAGE_STATS_ENABLED="0")
            run = subprocess.run(["ray", *words], env=env, cwd=home, capture_output=True, text=True, timeout=400)
            assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
            return run.stdout
        def on_the_head(*nodes):
            return ray("exec", "ssh.yaml", f"python /runs/on_the_head.py {' '.join(nodes)}")
        ray("get-auth-token", "--generate")
        (home/".ray"/"auth_token").chmod(0o600)
        ray("up", "-y", "--no-config-cache", "ssh.yaml")
        said = on_the_head("3")
        assert "nodes: 3" in said and "doctor: 0" in said and "WRONG" not in said, said
        assert "ranks on 10.0.0.1 10.0.0.2 10.0.0.3 (3.0, '1000')" in said, said
        assert said.count("/scratch/ray_spill, ") == 3 and said.count("ok   10.0.0.3") == 7, said
        assert [machines.on(i, "stat -c %a ~/.ray/auth_token")[1] for i in range(3)] == ["600\n"]*3
        before = machines.on(2, "pgrep -x raylet")[1]
        machines.cut(2)
        assert "nodes: 2" in on_the_head("2", "2")
        machines.join(2)
        assert on_the_head("3", "3").count("nodes: 3") == 2
        assert len(now := machines.on(2, "pgrep -x raylet")[1].split()) == 1 and now != before.split()
        ray("down", "-y", "ssh.yaml")
        assert machines.ray(0) == []
        wait = time.monotonic() + 200
        while any(left := [machines.ray(i) for i in (1, 2)]) and time.monotonic() < wait: time.sleep(1)
        assert not any(left), left


def laptop(home):
    "Of who starts the cluster: a key for SSH, and no token yet."
    for folder in (".ssh", ".ray"): (home/folder).mkdir(parents=True)
    (home/".ssh"/"id_ed25519").write_text("a key")
    return home


@needs_ray
def test_a_job_of_kuberay():
    """Every pod mounts the runs, a store and a spilling folder, and its limits are what Ray is to use. The dashboard is
    reached from other pods: KubeRay hands the job in there. (The file fits the RayJob schemas of KubeRay 1.5.1 and
    1.7.0, unknown fields refused; these are too large to keep here.)"""
    job = yaml.safe_load((FILES/"kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == dict(mode="token") and job["spec"]["backoffLimit"] > 0
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for group in (head, workers):
        assert known_options(" ".join(f"--{name}" for name in group["rayStartParams"]))
        spec, mounted = group["template"]["spec"], {}
        (pod,) = spec["containers"]
        for mount in pod["volumeMounts"]: mounted[mount["mountPath"]] = mount["name"]
        volumes = {v["name"]: v for v in spec["volumes"]}
        assert mounted.keys() == {"/runs", "/dev/shm", group["rayStartParams"]["object-spilling-directory"]}
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounted["/runs"]]
        assert {"cpu", "memory"} <= pod["resources"]["limits"].keys()
    assert "dashboard-host" not in head["rayStartParams"] and head["rayStartParams"]["num-cpus"] == "0"
    assert workers["replicas"]*int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
                                   ) == 16, "RayPool(16, gpus=1)"


IN_THE_JOB = """
import json
import ray
from rlblocks import RayPool
from rlblocks.placement.doctor import doctor
print("doctor:", doctor(["--cluster", "auto", "--folder", "/runs"]), flush=True)
quiet = dict(log_to_driver=False)
with RayPool(2, gpus=1, cluster=dict(address="auto", ready=60, options=quiet), timeout=120.) as pool:
    from ray_hosts import loops     # not before: with it comes the token of other tests
    print("cores", len(os.sched_getaffinity(0)), flush=True)
    print("ran on", *sorted(rank.address for rank in pool.processes.ranks), flush=True)
    print(json.dumps(loops(pool)), flush=True)
"""
POD = dict(RAY_CLUSTER_NAME="grpo-x", RAY_PORT="6379", RAY_USAGE_STATS_KUBERAY_IN_USE="1", RAY_USAGE_STATS_ENABLED="0",
           RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE="1", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789abcdef"*4)


def pod(group, i, head=False):
    """What KubeRay makes of a group of the file: the command of its container, and the environment (`pod.go` of KubeRay
    1.7). The head is reached by its address, where KubeRay has the name of a service."""
    (container,) = group["template"]["spec"]["containers"]
    limits, at = container["resources"]["limits"], "10.0.0.1:6379"
    size = int(limits["memory"].removesuffix("Gi"))*2**30
    params = {"num-cpus": limits["cpu"], "memory": size, "metrics-export-port": 8080, "block": "true",
              "dashboard-agent-listen-port": 52365}
    params |= {"dashboard-host": "0.0.0.0"} if head else {"address": at, "num-gpus": limits["nvidia.com/gpu"]}
    flags = (f"--{k}" if x == "true" else f"--{k}={x}" for k, x in sorted((params | group["rayStartParams"]).items()))
    command = f"ray start {'--head ' if head else ''}{' '.join(flags)}"
    env = POD | {x["name"]: x["value"] for x in container["env"]} | dict(KUBERAY_GEN_RAY_START_CMD=command)
    env |= dict(RAY_ADDRESS="127.0.0.1:6379" if head else at, RAY_CLOUD_INSTANCE_ID=f"grpo-x-{i}",
                RAY_NODE_TYPE_NAME=group.get("groupName", "headgroup"))
    waits = "" if head else f"until ray health-check --address {at} > /dev/null 2>&1; do sleep 1; done; "
    return f"{waits}ulimit -n 65536; exec {command}", env


@needs_ray
@pytest.mark.ranks
@pytest.mark.long
def test_the_containers_of_kubernetes(tmp_path):
    """`kubernetes.yaml`, its three containers as processes with what KubeRay gives them; only the limits of the workers
    and the store are smaller. The job gives the numbers of one process. The Ray of a container that was cut off ends,
    and with it the container; started again, as a kubelet does, it joins.

    Untried: KubeRay, the probes, and `ray job submit`, for which a dashboard is wanted that is not installed here."""
    from ray_hosts import loops
    from rlblocks import here
    from test_spmd import same
    if why := why_not(): pytest.skip(why)
    (runs := tmp_path/"runs").mkdir()
    (runs/"train.py").write_text(IN_THE_JOB)
    text = (FILES/"kubernetes.yaml").read_text()
    small = text.replace('cpu: "64"', 'cpu: "2"').replace('nvidia.com/gpu: "8"', 'nvidia.com/gpu: "1"').replace(
        '"30000000000"', '"100000000"')
    job = yaml.safe_load(small)["spec"]
    head, (workers,) = (job["rayClusterSpec"][k] for k in ("headGroupSpec", "workerGroupSpecs"))
    pods = [pod(head, 0, head=True), *(pod(workers, i + 1) for i in range(workers["replicas"]))]
    assert small != text and len(pods) == 3
    with Machines(3, folders={"/runs": runs, "/spill": None}) as machines:
        image = dict(PATH=f"{PATHS['PATH']}", PYTHONPATH=PATHS["PYTHONPATH"], HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        def container(i): return machines.start(i, pods[i][0], tmp_path/f"pod-{i}.txt", **pods[i][1], **image)
        running = [container(i) for i in range(3)]
        code, said = machines.on(0, f"cd /runs; {ALIVE}; {job['entrypoint']}", **pods[0][1], **image)
        assert code == 0 and "doctor: 0" in said and "ran on 10.0.0.2 10.0.0.3" in said, said[-5000:]
        assert said.count("/spill, ") == 3 and said.count("/runs            seen") == 3, said
        got = json.loads(next(line for line in said.splitlines() if line.startswith('{"grpo"')))
        same(got, loops(here), "kubernetes", 1e-10)
        machines.cut(2)
        time.sleep(12)              # a lost host is heard in 9 s
        machines.join(2)
        assert running[2].wait(60) != 0, "the container ends"
        running[2] = container(2)
        assert "nodes: 3" in machines.on(0, ALIVE, **pods[0][1], **image)[1]
        assert [x.poll() for x in running] == [None]*3


ALIVE = """python -c '
import time, ray
ray.init("auto", logging_level="ERROR", log_to_driver=False)
end = time.monotonic() + 90
while (found := sum(x["Alive"] for x in ray.nodes())) != 3 and time.monotonic() < end: time.sleep(.2)
print("nodes:", found)'"""


ON_ONE_HOST = """
import os
import runpy
import sys
import yaml
from rlblocks import RayPool

class Says:
    def given(self): return {k: os.environ.get(k) for k in ("COLOUR", "HF_TOKEN", "OPENAI_BASE_URL", "https_proxy")}

address, folder = sys.argv[1:]
sys.argv = ["rlblocks", "doctor", "--cluster", address, "--folder", folder]
try: runpy.run_module("rlblocks", run_name="__main__", alter_sys=True)
except SystemExit as e: print("doctor:", e.code)

with RayPool(**yaml.safe_load(f'''
ranks: 2
cpus: .5
gpus:
strategy: PACK
world: false
restarts: 1
timeout: 300
name: from_a_file
cluster:
  address: {address}
  env: {{COLOUR: blue}}
  ready: 60
  options: {{logging_level: ERROR, log_to_driver: false}}
''')) as pool:
    print("the ranks say", pool.place(Says).given())
    try: RayPool(2, cluster=dict(address=address, ready=1, options=dict(num_cpus=3)))
    except RuntimeError as e: print(e)
"""


@needs_ray
@pytest.mark.long
@pytest.mark.ranks
def test_one_host_the_doctor_and_a_pool_from_yaml(tmp_path):
    "`one_host.sh` starts a node with a new token; `rlblocks doctor --cluster` finds nothing wrong; YAML makes a pool."
    folder, out, token = Path(tempfile.mkdtemp(prefix="ray")), tmp_path/"node.txt", tmp_path/"secret"/"token"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {k: x for k, x in os.environ.items() if not k.startswith("RAY_")} | PATHS | dict(
        RAY_AUTH_TOKEN_PATH=str(token), PORT=str(port), STORE="100000000", SPILL=str(tmp_path/"spill"))
    options = ["--num-cpus=2", f"--temp-dir={folder}", "--include-dashboard=false"]
    with out.open("w") as f:
        node = subprocess.Popen(["bash", FILES/"one_host.sh", *options], env=env, stdout=f, stderr=f)
    try:
        wait_for_port(port, node, out)
        assert len(token.read_text()) == 64 and token.stat().st_mode & 0o777 == 0o600
        run = subprocess.run([sys.executable, "-c", ON_ONE_HOST, f"127.0.0.1:{port}", str(tmp_path)], timeout=300,
                             env=env | dict(RAY_AUTH_MODE="token", OMP_NUM_THREADS="1", HF_TOKEN="hf_x", https_proxy="http://proxy:1",
                                            OPENAI_BASE_URL="http://judge/v1"), capture_output=True, text=True)
    finally:
        seen = family(node.pid)
        node.terminate()
        node.wait()
        end(seen)
        shutil.rmtree(folder, ignore_errors=True)
    given = dict(COLOUR="blue", HF_TOKEN=None, OPENAI_BASE_URL="http://judge/v1", https_proxy="http://proxy:1")
    assert f"the ranks say {given}" in run.stdout, run.stdout + run.stderr[-3000:]
    assert run.stderr.count("HF_TOKEN set here, but not passed to the ranks") == 1, run.stderr[-3000:]
    assert "num_cpus=3 was asked for, it has 2" in run.stderr, run.stderr[-3000:]
    assert re.search(r"this process hold from_a_file-\w+: 2 × \(0.5 CPU\): pool.close\(\)", run.stdout), run.stdout
    wrong = [line for line in run.stdout.splitlines() if line.startswith("WRONG")]      # a container has little room
    assert all("/dev/shm" in line or "spilling folder" in line for line in wrong), wrong
    assert f"doctor: {int(bool(wrong))}" in run.stdout, run.stdout
    for words in ("versions         as here", "a lost host is heard in 9 s", f"{tmp_path/'spill'}, ", "seen"):
        assert words in run.stdout, run.stdout


OPEN = """
import sys
from rlblocks import RayPool
from rlblocks.placement.doctor import doctor
print("doctor:", doctor(["--cluster", sys.argv[1]]))
try: RayPool(1, cluster=sys.argv[1])
except (RuntimeError, ConnectionError) as e: print("refused:", e)
"""


@needs_ray
@pytest.mark.long
@pytest.mark.ranks
def test_an_open_cluster_is_refused_by_who_has_a_token(tmp_path):
    """What the cluster wants is not what this process sends: a process of the cluster is asked. (`ray start` wants a
    token by itself where there is a ~/.ray/auth_token, and so is told to run open.)"""
    folder, out = Path(tempfile.mkdtemp(prefix="ray")), tmp_path/"node.txt"
    from ray._private.services import get_node_ip_address
    host = get_node_ip_address()        # at 127.0.0.1 an open one listens for this machine alone
    with socket.socket() as s:
        s.bind((host, 0))
        port = s.getsockname()[1]
    env = {k: x for k, x in os.environ.items() if not k.startswith("RAY_")} | PATHS
    env["RAY_AUTH_MODE"] = "disabled"
    start = ["ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=1",
             f"--temp-dir={folder}", "--include-dashboard=false", "--object-store-memory=100000000",
             "--disable-usage-stats"]
    with out.open("w") as f: node = subprocess.Popen(start, env=env, stdout=f, stderr=f)
    try:
        wait_for_port(port, node, out, host)
        run = subprocess.run([sys.executable, "-c", OPEN, f"{host}:{port}"], timeout=300, capture_output=True,
                             text=True, env=env | dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789abcdef"*4))
    finally:
        end(family(node.pid))
        node.wait()
        shutil.rmtree(folder, ignore_errors=True)
    why = "RayPool: this Ray cluster has no token"
    assert re.search(f"WRONG {why}.*\ndoctor: 1", run.stdout), run.stdout
    assert re.search(f"refused: {why}", run.stdout), run.stdout + run.stderr[-3000:]


def wait_for_port(port, node, out, host="127.0.0.1"):
    "Until somebody listens there."
    while node.poll() is None:
        with socket.socket() as s:
            s.settimeout(1)
            if s.connect_ex((host, port)) == 0: return
        try: node.wait(.2)
        except subprocess.TimeoutExpired: pass
    raise RuntimeError(out.read_text()[-3000:])


# Slurm's two commands, as far as the script needs them. A host has a network, processes, a /dev/shm and a /tmp/ray of
# its own, so that `ray stop`, with which `ray symmetric-run` ends, finds no other process.
SCONTROL = "#!/bin/bash\nprintf '%s\\n' $ADDRESSES\n"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
i=0
for host in $HOSTS; do
  mkdir -p "$FOLDER/$i"
  SLURM_NODEID=$i ip netns exec "$host" unshare --pid --fork --mount --kill-child --mount-proc bash -c \\
    'taskset -cp "0-$((${SRUN_CPUS_PER_TASK:-1} - 1))" $$ > /dev/null
     mkdir -p /tmp/ray; mount --bind "$0" /tmp/ray; mount -t tmpfs tmpfs /dev/shm; exec "$@"' "$FOLDER/$i" "$@" &
  tasks[$i]=$!
  i=$((i + 1))
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
TRAIN = """
import json, os
from rlblocks import Cluster, RayPool
with RayPool(2, cpus=.5, nodes=2, cluster=dict(address="auto", ready=60), timeout=120.) as pool:
    from ray_hosts import loops     # not before: with it comes the token of other tests
    print("cores", len(os.sched_getaffinity(0)), flush=True)
    print("ran on", *sorted(rank.address for rank in pool.processes.ranks), flush=True)
    print(json.dumps(loops(pool)), flush=True)
"""


@needs_ray
@pytest.mark.ranks
@pytest.mark.long
def test_a_job_of_slurm(tmp_path):
    "`slurm.sh` on two network namespaces, `ray symmetric-run` and all: GRPO and PPO give the numbers of one process."
    from ray_hosts import loops
    from rlblocks import here
    from test_spmd import same
    if why := why_not(): pytest.skip(why)
    (tmp_path/"train.py").write_text(TRAIN)
    for name, text in dict(srun=SRUN, scontrol=SCONTROL).items():
        (tmp_path/name).write_text(text)
        (tmp_path/name).chmod(0o755)
    hosts, folder = Hosts(2), tempfile.mkdtemp(prefix="ray")
    try:
        hosts.connect()
        env = {k: x for k, x in hosts.env.items() if not k.startswith("RAY_")} | PATHS | dict(
            HOSTS=" ".join(map(hosts.host, range(2))), ADDRESSES=" ".join(map(hosts.address, range(2))), FOLDER=folder,
            HOME=str(tmp_path), PATH=os.pathsep.join([str(tmp_path), PATHS["PATH"]]), SLURM_JOB_ID="7",
            SLURM_JOB_NODELIST="host[0-1]", SLURM_JOB_NUM_NODES="2", SLURM_CPUS_PER_TASK="2", STORE="100000000",
            SPILL=str(tmp_path/"spill"), RAY_USAGE_STATS_ENABLED="0", RAY_gcs_rpc_server_reconnect_timeout_s="30")
        run = subprocess.run(["bash", FILES/"slurm.sh"], cwd=tmp_path, env=env, capture_output=True, text=True,
                             timeout=500)
    finally:
        hosts.__exit__()
        shutil.rmtree(folder, ignore_errors=True)
    assert "ran on 10.88.0.1 10.88.0.2" in run.stdout and run.returncode == 0, run.stdout[-5000:] + run.stderr[-5000:]
    assert f"cores {min(2, os.cpu_count())}" in run.stdout, "srun gives a task one core, unless it is told"
    got = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"grpo"')))
    same(got, loops(here), "slurm", 1e-10)
    assert not list((tmp_path/".ray").iterdir()), "the token is gone with the job"
