"""A program that a policy wrote cannot read outside its folder, open a socket, see the environment, outlive its
deadline, or take more than it was given; and a unit test says nothing but the truth about it (LAWS 19)."""
import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlblocks import GraderLimits, Grader, Sandbox, code_reward, run_code, sandbox_support
from rlblocks.graders import sandbox as module
from rlblocks.graders.code import as_call, passed_tests, program_in
from rlblocks.graders.jail import readable
from rlblocks.graders.sandbox import NEEDED, PARTS, run_all, run_in
from test_killable import batch

lacks = {k: why for k, why in sandbox_support().items() if why}
confined = pytest.mark.skipif(any(k in lacks for k in NEEDED), reason=f"this system has no {lacks}")
PATIENT = Sandbox(seconds=60.)


def fails(program, error, sandbox=PATIENT):
    r = run_code(program, sandbox=sandbox)
    assert r.kind == "failed" and error in r.stderr, r
    return r


@confined
def test_a_program_reads_what_it_is_given_and_says_what_it_prints():
    r = run_code("import sys\nprint(input()[::-1]); print('ü', file=sys.stderr); sys.exit(3)", stdin="Größe\n",
                 sandbox=PATIENT)
    assert (r.kind, r.stdout, r.stderr, r.code, r.ok) == ("failed", "eßörG\n", "ü\n", 3, False)
    r = run_code("print(open('data.txt').read()); open('new', 'w').write('x'); print(open('new').read())",
                 files={"data.txt": "here"}, sandbox=PATIENT)
    assert r.ok and r.stdout == "here\nx\n"
    assert run_code("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", sandbox=PATIENT).kind == "died"
    threads = ("import asyncio, threading\nasync def f(): return 3\n"
               "t = threading.Thread(target=print, args=(5,))\nt.start(); t.join(); print(asyncio.run(f()))")
    assert run_code(threads, sandbox=PATIENT).stdout == "5\n3\n"


@confined
@pytest.mark.parametrize("without", ["", "landlock", "tasks", "landlock tasks"])
def test_it_sees_and_changes_nothing_outside(tmp_path, without):
    """Landlock is a second wall: an old kernel without it keeps as much out. Where tasks are not counted, the program
    owns what the trainer owns, as an ordinary user's does."""
    secret = tmp_path/"secret"
    secret.write_text("s3cret")
    before = os.stat(secret).st_ctime_ns        # of whatever change
    does = [f"print({does})" for does in (
        "open(p).read()", "open('/old' + p).read()", "open('/etc/passwd').read()", f"open({__file__!r}).read()",
        "open('/proc/self/environ').read()", f"open('/proc/{os.getpid()}/environ').read()",
        "os.listdir(os.path.dirname(p))",
        "os.symlink(p, 'here'), open('here').read()", "open(p, 'w')", "os.unlink(p)", "os.rename(p, 'x')",
        "os.truncate(p, 0)", "open(p + '2', 'w')", "os.chmod(p, 0o777)", "os.chmod(os.path.dirname(p), 0o777)",
        "os.utime(p, (0, 0))", "os.setxattr(p, 'user.x', b'1')", "os.chown(p, os.getuid(), -1)", "os.link(p, 'there')",
        "open('/x', 'w')", "open('/tmp/x', 'w')", "os.chmod(os.__file__, 0o777)", "os.utime(os.__file__)")]
    program = f"import os\np = {str(secret)!r}\n" + "\n".join(
        f"try: {line}\nexcept OSError: n = globals().get('n', 0) + 1" for line in does) + "\nprint(n)"
    use = [k for k in PARTS if k not in lacks and k not in without.split()]
    r, = run_in(use, [dict(program=program, stdin="", files={})], PATIENT)
    assert r.stdout == f"{len(does)}\n", r
    assert secret.read_text() == "s3cret" and os.listdir(tmp_path) == ["secret"]
    assert os.stat(secret).st_ctime_ns == before


@confined
def test_it_imports_what_it_may():
    "The folder of packages beside the standard library is empty; packages=True shows the trainer's."
    looks = "import sys\nsys.path += %r\ntry: import numpy, torch; print('there')\nexcept ImportError: print('absent')"
    own = [os.path.dirname(os.path.dirname(module.__file__)), *[p for p in sys.path if p.endswith("-packages")]]
    assert run_code(looks % own, sandbox=PATIENT).stdout == "absent\n"
    base = Path(os.__file__).parent/"site-packages"         # of the interpreter itself
    r = run_code(f"import os\nprint(os.listdir({str(base)!r}))", sandbox=PATIENT)
    assert r.stdout == "[]\n" or not base.exists(), r
    assert run_code("import numpy; print(numpy.ones(3).sum())",
                    sandbox=Sandbox(seconds=60., packages=True, memory=4 << 30)).stdout == "3.0\n"


@confined
def test_it_opens_no_socket():
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        fails(f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)", "PermissionError")
    fails("import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')", "Operation not permitted")


@confined
def test_no_datagram_reaches_the_host(tmp_path):
    """A pair of datagram sockets needs no `socket`, and each can send to any address, descriptors too. A pair of
    streams is connected for good, and asyncio starts with one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        host.bind(str(tmp_path/"log"))
        host.setblocking(False)
        for kind in ("SOCK_DGRAM", "SOCK_RAW"):
            fails(f"import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.{kind})\n"
                  f"a.sendto(b'x', {str(tmp_path/'log')!r})", "PermissionError")
        with pytest.raises(BlockingIOError): host.recv(1)
    assert run_code("import socket\na, b = socket.socketpair()\na.send(b'x'); print(b.recv(1))",
                    sandbox=PATIENT).stdout == "b'x'\n"


@confined
def test_it_sees_no_environment(monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    r = run_code("import os; print(dict(os.environ))", sandbox=PATIENT)
    assert r.ok and "API_KEY" not in r.stdout and "s3cret" not in r.stdout and "PATH" not in r.stdout


@confined
@pytest.mark.parametrize("program", [
    "import time; time.sleep(3600)", "while True: pass",
    "import signal, time\nfor s in (15, 2, 1): signal.signal(s, signal.SIG_IGN)\ntime.sleep(3600)",
    "import os, time\nos.close(1); os.close(2); time.sleep(3600)",
    "import os, time\nif os.fork(): time.sleep(3600)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(3600)"])
def test_it_ends_at_its_deadline(program):
    began = time.monotonic()
    r = run_code(program, sandbox=Sandbox(seconds=1., processes=9))
    assert r.kind == "timeout" and time.monotonic() - began < 30


@confined
def test_a_daemon_ends_with_its_program():
    "It keeps a pipe of ours open as long as it lives: were it alive, the program would end at the deadline."
    r = run_code("import os, time\nif not os.fork():\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
                 "    time.sleep(3600)\nprint('gone')", sandbox=Sandbox(seconds=120., processes=9))
    assert r.ok and r.stdout == "gone\n" and r.seconds < 100


@confined
def test_a_fork_bomb_starts_nothing():
    fails("import os\nwhile True: os.fork()", "PermissionError")
    fails("import subprocess, sys; subprocess.run([sys.executable, '-c', ''])", "PermissionError")


# a thread by the bare system call: all on one stack, so that no limit on memory counts them
THREADS = """import ctypes, mmap, os
code, stack = mmap.mmap(-1, 4096, prot=7), mmap.mmap(-1, 1 << 16)
code.write(bytes.fromhex("b838000000 0f05 85c0 7401 c3 b822000000 0f05 ebf7"))     # clone; in the new one: pause
clone = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ctypes.addressof(ctypes.c_char.from_buffer(code)))
n, top = 0, ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 16) - 64
while n < 400 and clone(0x50f00, top, None, None) > 0: n += 1
print(n, flush=True); os._exit(0)"""


@confined
def test_its_threads_and_processes_are_counted():
    "For root too, who runs it as nobody; and programs side by side share no count."
    if os.uname().machine == "x86_64":
        made = run_all([dict(program=THREADS)]*3, Sandbox(seconds=60., workers=3))
        assert all(r.ok and 32 <= int(r.stdout) <= 80 for r in made), made
    r = run_code("import os\nn = 0\ntry:\n    while n < 400:\n        if not os.fork(): import time; time.sleep(3600)\n"
                 "        n += 1\nexcept OSError: print(n)", sandbox=Sandbox(seconds=60., processes=9))
    assert 9 <= int(r.stdout) <= 80, r
    fails("import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
          "if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'new user')",
          "new user", Sandbox(seconds=60., processes=9))


@confined
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are this processor's")
def test_it_takes_nothing_that_all_programs_share():
    calls = dict(io_setup=206, io_submit=209, fanotify_init=300, pidfd_getfd=438)
    r = run_code(f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in {[*calls.values()]}:\n"
                 "    libc.syscall(n, 1, 0, 0, 0)\n    print(ctypes.get_errno())", sandbox=PATIENT)
    assert r.stdout == f"{errno.EPERM}\n"*len(calls), r


@confined
def test_it_prints_allocates_and_writes_no_more_than_it_may():
    r = run_code("import sys\nfor _ in range(1024): sys.stdout.write('x'*(1 << 20))", sandbox=PATIENT)
    assert r.kind == "output" and len(r.stdout) <= 1 << 20
    fails("x = bytearray(8 << 30)", "MemoryError")
    fails("f = open('big', 'wb')\nfor _ in range(1024): f.write(bytes(1 << 20))", "OSError")
    fails("import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
          "if libc.shmget(0, 1 << 20, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')", "shmget")
    fails("import os; os.memfd_create('x')", "PermissionError")
    fails("for i in range(1024): open(str(i), 'wb').write(bytes(1 << 20))", "No space left")


@confined
def test_it_has_no_privileges():
    for does in ("os.setuid(0)", "os.chroot('.')", "os.mkdir('/x')", "os.kill(1, 9) or exit(1)", "os.unshare(0)"):
        assert run_code(f"import os; {does}", sandbox=PATIENT).kind == "failed", does
    fails("import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
          "if libc.unshare(0x10000000): raise OSError(ctypes.get_errno(), 'unshare')", "unshare")


@confined
def test_nothing_is_left_and_a_batch_runs_side_by_side():
    "No child, no descriptor of ours; results in the order of the programs."
    before = set(os.listdir("/proc/self/fd"))
    programs = [dict(program=f"print({i})" if i % 5 else "import time; time.sleep(3600)") for i in range(20)]
    made = run_all(programs, Sandbox(seconds=3., workers=4))
    assert all(r.kind == "timeout" for r in made[::5])
    assert any(r.ok for r in made)
    assert [r.stdout for r in made if r.ok] == [f"{i}\n" for i, r in enumerate(made) if r.ok]
    assert set(os.listdir("/proc/self/fd")) <= before


@confined
def test_ctrl_c_ends_the_programs_under_way_and_begins_no_other():
    code = ("import signal\nimport rlblocks.graders.sandbox as s\nbegun, runs = s.begun, []\n"
            "def begin(spec):\n    runs.append(begun(spec))\n"
            "    if len(runs) == 3: signal.raise_signal(signal.SIGINT)\n    return runs[-1]\n"
            "s.run_all([dict(program='')])\ns.begun = begin\n"
            "try: s.run_all([dict(program='import time; time.sleep(3600)')]*9, s.Sandbox(seconds=3600., workers=3))\n"
            "except KeyboardInterrupt: print(len(runs), None in [r.child.returncode for r in runs[:2]])\n")
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert r.stdout == "3 False\n", r


@confined
def test_a_program_ends_with_a_trainer_that_is_killed_while_it_begins():
    "The moment between the start of the first process and its wish to hear of the trainer's end is a fraction of a ms."
    code = ("import os, sys\nfrom rlblocks.graders import sandbox as s\nread, write = map(int, sys.argv[1:])\n"
            "spec = s.spec_of('import time; time.sleep(3600)', '', {}, s.parts_in_use(s.Sandbox()), s.Sandbox())\n"
            "os.set_inheritable(write, True)\n"
            "made = s.subprocess.Popen\n"
            "s.subprocess.Popen = lambda *a, pass_fds, **k: made(*a, pass_fds=(*pass_fds, write), **k)\n"
            "s.begin_jail(spec)\nos.kill(os.getpid(), 9)")
    for _ in range(3):
        read, write = os.pipe()
        trainer = subprocess.Popen([sys.executable, "-c", code, str(read), str(write)], pass_fds=(read, write))
        os.close(write)
        assert trainer.wait(120) == -9
        assert readable([read], 60.)            # nobody has the pipe any more: else that takes an hour
        os.close(read)


# -- systems that offer less

def offers(monkeypatch, **missing):
    monkeypatch.setattr(module, "sandbox_support", lambda: dict.fromkeys(PARTS, "") | missing)


@pytest.mark.parametrize("part, why", NEEDED.items())
def test_a_system_that_cannot_keep_it_in_refuses(monkeypatch, part, why):
    offers(monkeypatch, **{part: "Operation not permitted"})
    with pytest.raises(RuntimeError, match=rf"no {part} \(Operation not permitted\): {why}.*isolation=\"partial\""):
        run_code("print(1)")
    assert module.parts_in_use(Sandbox(isolation="partial")) == [k for k in PARTS if k != part]


def test_partial_runs_with_what_is_there(monkeypatch):
    folders = set(Path("/tmp").glob("sandbox-*"))
    monkeypatch.setattr(module, "sandbox_support", lambda: dict.fromkeys(PARTS, "none here"))
    partial = Sandbox(seconds=60., isolation="partial")
    r = run_code("import os; print(os.getcwd().split('/')[-1][:8]); open('x', 'w').write('1')", sandbox=partial)
    assert r.ok and r.stdout == "sandbox-\n"
    assert run_code("import time; time.sleep(3600)", sandbox=Sandbox(seconds=1., isolation="partial")).kind == "timeout"
    # folders deeper than Python can go, folders that forbid to be read, and links that lead out
    left = ("import os\nos.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0); os.symlink('/tmp', 'c')\n"
            "for i in range(3000): os.mkdir('d'); os.chdir('d')")
    assert run_code(left, sandbox=partial).ok
    daemon = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(3600)"
    assert run_code(daemon, sandbox=Sandbox(seconds=60., isolation="partial", processes=9)).ok
    assert not set(Path("/tmp").glob("sandbox-*")) - folders


@confined
def test_a_program_with_the_trainers_rights_does_not_interrupt_process_1():
    "An ordinary user's has them, where Landlock keeps no signals in (Linux before 6.12)."
    use = [k for k in PARTS if k not in lacks and k not in ("landlock", "tasks")]
    kills = "import os\nfor s in range(1, 65): os.kill(1, s)\nprint('here')"
    r, = run_in(use, [dict(program=kills, stdin="", files={})], PATIENT)
    assert r.ok and r.stdout == "here\n", r


@confined
def test_a_program_larger_than_its_folder_is_a_failed_one():
    large, small = "#" + "x"*20000 + "\n" + ADD, Sandbox(seconds=60., disk=8192)
    assert code_reward(sandbox=small)([ADD, large, ADD], [["assert add(1, 2) == 3"]]*3) == [1., 0., 1.]
    assert "larger than its folder" in run_code(large, sandbox=small).stderr


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "..", "", "a\0b"])
def test_files_lie_beside_the_program(name):
    with pytest.raises(ValueError, match="a name without a folder is wanted"): run_code("", files={name: ""})


@confined
def test_an_interpreter_that_does_not_start_is_no_failure_of_programs(monkeypatch):
    "Root runs programs as nobody, who may not be allowed to read the interpreter's files: all rewards would be 0."
    command, needs = module.interpreter(False)
    monkeypatch.setattr(module, "interpreter", lambda packages: ([*command, "-c", "import unreadable"], needs))
    module.check_interpreter.cache_clear()
    with pytest.raises(RuntimeError, match="(?s)does not run in the sandbox: .*unreadable.*must be readable"):
        run_code("print(1)")
    module.check_interpreter.cache_clear()


def test_settings_are_checked():
    with pytest.raises(ValueError, match="Sandbox: seconds=0; a number above 0"): Sandbox(seconds=0)
    with pytest.raises(ValueError, match="isolation='none'; \"full\" or \"partial\""): Sandbox(isolation="none")


# -- tests of programs

ADD = "def add(a, b): return a + b"
TESTS = ["assert add(1, 2) == 3", dict(call="add", args=[[1], [2]], result=[1, 2]), "assert add('a', 'b') == 'ab'"]


@confined
def test_statements_calls_and_printed_lines():
    both = [dict(stdin="3 4\n", stdout="7\n12"), "assert two(3, 4) == (7, 12)"]
    program = ("def two(a, b): return a + b, a*b\n"
               "if __name__ == '__main__': print(*two(*map(int, input().split())), sep=' \\n')")
    assert passed_tests([ADD, "def add(a, b): return 3", program], [TESTS, TESTS, both], PATIENT) == [
        [True]*3, [True, False, False], [True]*2]


# reads the word that results stand behind, and says that all is well; and what is no result
FORGER = ("import json, os\nword, tests = json.loads(os.pread(3, 1 << 20, 0))\n"
          "for i in (0, 0, 99, -1, None, 'x'): os.write(1, f'\\n{word} {json.dumps([i, True, 41])}\\n'.encode())\n"
          "os.write(1, f'\\n{word} garbage\\n{word} [1]\\n{word} 3\\n'.encode()); os._exit(0)")


def test_an_assertion_of_equality_is_a_call():
    assert as_call(" assert f(1, [2], k='x') == {'a': 3}") == dict(call="f", args=[1, [2]], kwargs=dict(k="x"),
                                                                  result=dict(a=3))
    for other in ("assert f((1, 2)) == 3", "assert f(1) == (1, 2)", "assert f(*[1]) == 2", "assert f(1)", "f(1)",
                  "assert a.f(1) == 2", "assert f(1) != 2", "assert f(1) == 2 == 2", "assert f({1: 2}) == 1", "x ==",
                  "x = 1\nassert f(x) == 1", "assert f(**{'a': 1}) == 2", "assert f(g(1)) == 2",
                  dict(stdin="", stdout="")):
        assert as_call(other) == other


@confined
@pytest.mark.parametrize("cheat", [
    "import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "print('passed')", "",
    "class Any:\n    def __eq__(self, x): return True\ndef f(): return Any()",
    "class Any(int):\n    def __eq__(self, x): return True\ndef f(): return Any()",
    "import builtins\nbuiltins.all = lambda x: True\ndef f(): return 0", "def f(): import os; os._exit(0)",
    FORGER, "import sys, json\nfor i in range(9): print('\\n' + json.dumps([i, True, 42]))\ndef f(): return 0"])
def test_cheats_pass_no_call(cheat):
    assert passed_tests([cheat], [[dict(call="f", result=42), "assert f() == 42"]], PATIENT) == [[False]*2]


# prints a result that is nested deeper than Python reads
BOMB = ("import json, os\nword, tests = json.loads(os.pread(3, 1 << 20, 0))\n"
        "os.write(1, f'\\n{word} [0, true, {\"[\"*400000 + \"]\"*400000}]\\n'.encode()); os._exit(0)")


@confined
def test_one_program_takes_no_other_reward_down():
    "It says what the jail says when it fails; its results are nested deeper than Python compares, or reads."
    nested = "def add(a, b):\n    x = 3\n    for _ in range(%d): x = [x]\n    return x"
    programs = [ADD, "import os; os.write(2, b'sandbox: x'); os._exit(125)", BOMB, nested % 960, nested % 0]
    reward = code_reward(sandbox=Sandbox(seconds=60., output=1 << 21))
    assert reward(programs, [["assert add(1, 2) == 3"]]*5) == [1., 0., 0., 0., 1.]
    r = run_code(programs[1], sandbox=PATIENT)
    assert (r.kind, r.code, r.stderr) == ("failed", 125, "sandbox: x")


@confined
def test_an_endless_test_costs_itself_and_what_comes_behind():
    program = "import time\ndef f(n):\n    if n == 2: time.sleep(3600)\n    return n"
    tests = [dict(call="f", args=[n], result=n) for n in (1, 2, 3)]
    assert passed_tests([program], [tests], Sandbox(seconds=8.)) == [[True, False, False]]
    loud = [dict(call="f", args=[1 << 22], result=1 << 22), *tests]
    assert passed_tests(["def f(n): print('x'*n); return n"], [loud], PATIENT) == [[False]*4]


@confined
def test_the_reward_of_a_batch():
    texts = [f"So:\n```python\n{ADD}\n```\nDone.", "```py\nadd = max\n```", "no code", ADD]
    b = batch(texts, tests=[TESTS, TESTS, TESTS, []])
    scores = Grader(code_reward(share=True, sandbox=PATIENT), name="code").score(b)
    assert scores[:3].tolist() == pytest.approx([1., 0., 0.]) and scores[3].isnan()
    limits = GraderLimits(240., item=120.)
    assert Grader(code_reward(sandbox=PATIENT), deadline=limits).score(b)[:3].tolist() == [1., 0., 0.]
    for said in ("", "py", "python", "Python3", "PYTHON", "{python}", "{.python}", "python title=x.py", "python\r"):
        assert program_in(f"So:\n```{said}\nb\n```\nprints\n```text\nc\n```\n") == "b\n", said
    assert program_in("```\na\n```\n```python\nb\n```\n```\nc\n```\n") == "b\n"      # what it prints, say
    assert program_in("```python\na\n```\nNo:\n~~~~py\ns = \"```\"\n~~~~") == "s = \"```\"\n"
    assert program_in("```py\ns = '```'\nb```") == "s = '```'\nb" and program_in("```python\ncut") == "cut"
    assert program_in("```java\na\n```") == "```java\na\n```"
    with pytest.raises(RuntimeError, match="is no test; a statement"): Grader(code_reward()).score(
        batch(["x"], tests=[[dict(stdin="1")]]))
