"""`rlblocks watch FOLDER`: what another process writes is read while it writes, and drawn."""
import os
import pty
import re
import sys
from pathlib import Path

from rlblocks.people.command import command_line
from rlblocks.people.monitor import RunFolder, monitor_html, monitor_text, run_folders
from rlblocks.people.terminal_curves import curve_text
from rlblocks.tracking.sinks import JsonLines


def write(folder, steps, total=None, first=0, **numbers):
    log = JsonLines(Path(folder)/"log.jsonl")
    for i in range(first, steps):
        log.log(dict(reward=i/10, seconds=2., seconds_sample=1.5, seconds_update=.5) | numbers, i)
        answer = dict(prompt="1<2\n=", completion="<script>yes\x1b]0;hello", score=float("nan"))
        if i % 2 == 0: log.table("samples", [dict(step=i) | answer])
    if total: Path(folder, "config.yaml").write_text(f"grid:\n  steps: 3\nsteps: {total}\n")


def test_a_run_is_read_while_it_is_written(tmp_path):
    run = RunFolder(tmp_path)
    assert run.read() and run.status(0.) == "no step yet" and not run.done
    write(tmp_path, 3, total=5)
    with run.log.path.open("a") as out: out.write('{"step": 3, "rew')        # half a line
    assert run.read() and [row["step"] for row in run.rows] == [0, 1, 2] and not run.done
    assert run.status(run.written + 7) == "step 2 of 5 · 2 s a step · 4 s left · written 7 s ago"
    assert "silent for 2 min: stopped?" in run.status(run.written + 100) and "written 20" in run.status()
    assert not run.read()
    write(tmp_path, 5, first=3)
    assert run.read() and [row["step"] for row in run.rows] == [0, 1, 2, 3, 4] and run.done and "done" in run.status(0.)


def test_runs_are_found_and_named(tmp_path):
    for name in ("a/x", "b/x", "b/y"): write(tmp_path/name, 2)
    assert [*run_folders([tmp_path/"b"])] == ["x", "y"]
    assert [*run_folders([tmp_path/"a"/"x", tmp_path/"b"])] == [str(tmp_path/"a/x"), str(tmp_path/"b/x"), "y"]
    assert [*run_folders([tmp_path/"b/y/log.jsonl"])] == ["log.jsonl"]


def test_a_page_holds_what_was_written_and_no_code_of_an_answer(tmp_path):
    write(tmp_path/"a", 12)
    write(tmp_path/"b", 12, loss=float("nan"))
    runs = run_folders([tmp_path])
    for run in runs.values(): run.read()
    page = monitor_html(runs, reload=3.)
    assert "<script" not in page and "&lt;script&gt;yes" in page and "1&lt;2\n=" in page and 'content="3"' in page
    assert page.count("<title>a</title>") == page.count("<title>b</title>") == 1
    assert "ago" not in page                # it stays as it is when its writer has gone
    assert "⚠ loss was nan" in page and page.count("<summary>step 10</summary>") == 2
    assert "refresh" not in monitor_html(runs)
    text = "\n".join(monitor_text(runs))
    assert "\x1b]0;" not in text and "yes\x1b" not in text      # what a terminal would obey
    assert "⚠ loss was nan" in text and "samples of b" in text and "1<2 = → <script>yes ]0;hello" in text


def test_the_plot_of_a_terminal_rises_with_its_numbers():
    lines = curve_text("x", {"": [dict(step=i, x=float(i)) for i in range(40)]}, width=29, height=5)
    plot = [line[9:] for line in lines[1:-1]]
    assert {len(line) for line in lines} == {29} and lines[1].split()[0] == "39" and lines[0].split() == ["x", "39"]
    firsts = [len(line) - len(line.lstrip(" ")) for line in plot]
    assert firsts == sorted(firsts, reverse=True) and plot[0][-1] != " " and plot[-1][0] != " "
    assert plot[0][0] == plot[-1][-1] == " "


def test_a_terminal_follows_a_run_until_it_is_done(tmp_path):
    log, page, said = JsonLines(tmp_path/"log.jsonl"), tmp_path/"page.html", ""
    write(tmp_path, 1, total=4)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "rlblocks", "watch", str(tmp_path), "--every", ".1",
                                  "--html", str(page)])
    for i in range(1, 4):
        while f"step {i - 1} of 4" not in said: said += os.read(terminal, 100_000).decode(errors="ignore")
        assert "done" not in said and 'http-equiv="refresh"' in page.read_text()
        log.log(dict(reward=1.), i)
    try:
        while part := os.read(terminal, 100_000): said += part.decode(errors="ignore")
    except OSError: pass        # the end of a terminal
    assert os.waitpid(pid, 0)[1] == 0 and "step 3 of 4 · 2 s a step · done" in said.split("\x1b[H")[-1]
    assert "2 s a step · done" in page.read_text() and "refresh" not in page.read_text()


def test_the_command_prints_once_into_a_file_and_names_what_is_wrong(tmp_path, capsys):
    for name in ("a", "b"): write(tmp_path/name, 2)
    assert command_line(["watch", str(tmp_path), "--keys", "reward"]) == 0
    said = capsys.readouterr().out
    assert "reward" in said and "\x1b" not in said
    assert command_line(["watch", str(tmp_path/"none")]) == 2
    assert re.fullmatch(r"rlblocks watch: there is no folder .*none; .* is wanted\n", capsys.readouterr().err)
    assert command_line(["watch", str(tmp_path), "--keys", "rewards"]) == 2
    assert "no step has 'rewards'" in capsys.readouterr().err
