"""A program that a policy wrote cannot read outside its folder, open a socket, see the environment, outlive its
deadline, or take more than it was given; and a unit test says nothing but the truth about it (LAWS 19)."""
import os
import threading
import time

import pytest
from rlblocks import Caps, Grader, Sandbox, code_reward, run_code, sandbox_support
from rlblocks.graders import sandbox as module
from rlblocks.graders.code import as_call, passed_tests, program_in
from rlblocks.graders.sandbox import NEEDED, run_all
from test_killable import batch

lacks = {k: why for k, why in sandbox_support().items() if why}
confined = pytest.mark.skipif(any(k in lacks for k in NEEDED), reason=f"this system has no {lacks}")
PATIENT = Sandbox(seconds=60.)


def need(*parts):
    for k in parts:
        if k in lacks: pytest.skip(f"this system has no {k}: {lacks[k]}")


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
def test_it_cannot_read_outside_its_folder(tmp_path):
    (tmp_path/"secret").write_text("s3cret")
    for path in (tmp_path/"secret", "/etc/passwd", __file__, "/proc/self/environ", f"/proc/{os.getpid()}/environ"):
        r = run_code(f"print(open({str(path)!r}).read())", sandbox=PATIENT)
        assert r.kind == "failed" and "s3cret" not in r.stdout and "Error" in r.stderr, (path, r)
    fails(f"import os; print(os.listdir({str(tmp_path)!r}))", "PermissionError")
    fails(f"import os; os.symlink({str(tmp_path/'secret')!r}, 'here'); print(open('here').read())", "PermissionError")


@confined
def test_it_changes_nothing_outside(tmp_path):
    (tmp_path/"mine").write_text("mine")
    for does in ("open(p, 'w')", "os.unlink(p)", "os.rename(p, 'x')", "os.truncate(p, 0)", "open(p + '2', 'w')"):
        r = run_code(f"import os\np = {str(tmp_path/'mine')!r}\n{does}", sandbox=PATIENT)
        assert r.kind == "failed", (does, r)
    need("mount")
    fails(f"import os; os.chmod({str(tmp_path/'mine')!r}, 0o777)", "Read-only file system")
    assert (tmp_path/"mine").read_text() == "mine" and os.listdir(tmp_path) == ["mine"]


@confined
def test_it_opens_no_socket():
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        fails(f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)", "PermissionError")
    fails("import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')", "Operation not permitted")


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
    r = run_code("import os\nfor i in range(50):\n    if not os.fork(): break\nimport time; time.sleep(3600)",
                 sandbox=Sandbox(seconds=2., processes=9))
    assert r.kind in ("timeout", "failed")     # the limit does not bind root; the namespace ends them all


@confined
def test_it_prints_allocates_and_writes_no_more_than_it_may():
    r = run_code("import sys\nfor _ in range(1024): sys.stdout.write('x'*(1 << 20))", sandbox=PATIENT)
    assert r.kind == "output" and len(r.stdout) <= 1 << 20
    fails("x = bytearray(8 << 30)", "MemoryError")
    fails("f = open('big', 'wb')\nfor _ in range(1024): f.write(bytes(1 << 20))", "OSError")
    fails("import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
          "if libc.shmget(0, 1 << 20, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')", "shmget")
    fails("import os; os.memfd_create('x')", "PermissionError")
    need("mount")
    fails("for i in range(1024): open(str(i), 'wb').write(bytes(1 << 20))", "No space left")


@confined
def test_it_has_no_privileges():
    for does in ("os.setuid(0)", "os.chroot('.')", "os.mkdir('/x')", "os.kill(1, 9) or exit(1)", "os.unshare(0)"):
        assert run_code(f"import os; {does}", sandbox=PATIENT).kind == "failed", does
    fails("import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
          "if libc.unshare(0x10000000): raise OSError(ctypes.get_errno(), 'unshare')", "unshare")


@confined
def test_nothing_is_left_and_a_batch_runs_side_by_side():
    "No child, no folder, no descriptor of ours; results in the order of the programs."
    import tempfile
    from pathlib import Path
    before, folders = set(os.listdir("/proc/self/fd")), set(Path(tempfile.gettempdir()).glob("sandbox-*"))
    programs = [dict(program=f"print({i})" if i % 5 else "import time; time.sleep(3600)") for i in range(20)]
    made = run_all(programs, Sandbox(seconds=3., workers=4))
    assert all(r.kind == "timeout" for r in made[::5])
    assert [r.stdout for i, r in enumerate(made) if i % 5 and r.ok] == [
        f"{i}\n" for i, r in enumerate(made) if i % 5 and r.ok]
    assert not set(Path(tempfile.gettempdir()).glob("sandbox-*")) - folders
    mine = {fd for fd in set(os.listdir("/proc/self/fd")) - before if _is_ours(fd)}
    assert not mine and not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")
                             and t.is_alive() and "run_all" in str(getattr(t, "_target", ""))]


def _is_ours(fd):
    try: at = os.readlink(f"/proc/self/fd/{fd}")
    except OSError: return False
    return "memfd:spec" in at or "sandbox-" in at


def test_a_system_that_cannot_keep_it_in_refuses(monkeypatch):
    offers = dict.fromkeys(module.PARTS, "") | dict(pid="Operation not permitted")
    monkeypatch.setattr(module, "sandbox_support", lambda: offers)
    with pytest.raises(RuntimeError, match=r"no pid \(Operation not permitted\): what it starts may outlive.*unsafe="):
        run_code("print(1)")
    assert module.parts_in_use(True) == [k for k in module.PARTS if k != "pid"]


def test_unsafe_runs_with_what_is_there(monkeypatch):
    monkeypatch.setattr(module, "sandbox_support", lambda: dict.fromkeys(module.PARTS, "none here"))
    r = run_code("import os; print(os.getcwd().split('/')[-1][:8]); open('x', 'w').write('1')",
                 sandbox=Sandbox(seconds=60., unsafe=True))
    assert r.ok and r.stdout == "sandbox-\n"
    assert run_code("import time; time.sleep(3600)", sandbox=Sandbox(seconds=1., unsafe=True)).kind == "timeout"


def test_settings_are_checked():
    with pytest.raises(ValueError, match="Sandbox: seconds=0; a number above 0"): Sandbox(seconds=0)


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
    assert Grader(code_reward(sandbox=PATIENT), deadline=Caps(240., item=120.)).score(b)[:3].tolist() == [1., 0., 0.]
    assert program_in("```\na\n```\n```python\nb\n```") == "b\n" and program_in("```python\ncut") == "cut"
    with pytest.raises(RuntimeError, match="is no test; a statement"): Grader(code_reward()).score(
        batch(["x"], tests=[[dict(stdin="1")]]))
