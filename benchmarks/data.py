"""From a file of a million rows to the first batch, beyond tokenisation; memory of a stream; what resuming it costs.

Rows are JSONL of about 200 bytes, made here. The tokenizer is a stand-in that makes an id of four characters, so that
what is left is reading, converting, checking and keeping; the time in `encode` is taken off ("beyond"). "text" rows are
{id, prompt, answer, source}, which Arrow parses; "messages" are {messages} of two turns (a fifth as many), parsed and
converted one by one. Each case is a process of its own; seconds are of its CPU (other work runs on the machine) and of
the clock, memory is the highest resident size in MB.

python benchmarks/data.py [--rows 1000000] [--cases text messages stream]
writes benchmarks/results/data.json"""
import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from machine import machine

OUT = Path(__file__).resolve().parent/"results"/"data.json"
WORDS = "the of and a to in is you that it he was for on are as with his they at be this have from".split()


class Quarters:
    "A fast tokenizer's face: an id for four characters."
    bos_token_id, eos_token_id, eos_token, backend_tokenizer = 1, 2, "</s>", None
    chat_template = "stand-in"
    def __call__(self, texts, add_special_tokens=True):
        return dict(input_ids=[list(range(3, 3 + len(t)//4)) for t in texts])
    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "*add_generation_prompt


def write(file, rows, kind):
    with open(file, "w") as f:
        for i in range(rows):
            text = " ".join(WORDS[(i*k + k) % len(WORDS)] for k in range(1, 28))
            f.write(json.dumps(dict(id=i, messages=[dict(role="user", content=f"{i}: {text}?"), dict(
                role="assistant", content=f"It is {i % 9973}.")]) if kind == "messages" else dict(
                id=i, prompt=f"{i}: {text}?", answer=str(i % 9973), source="made")) + "\n")


def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss//1000


def clocked(times, name, f):
    cpu, clock = time.process_time(), time.perf_counter()
    made = f()
    times[name] = dict(cpu=round(time.process_time() - cpu, 2), clock=round(time.perf_counter() - clock, 2))
    return made


def case(file, kind):
    "The first batch of a file, in this process."
    from rlblocks import Demonstrations, Prompts, Stream, load_rows
    import datasets     # noqa: F401 (its import is not measured)
    from rlblocks.data import demonstrations, prompts
    times, before, spent = {}, peak(), []
    inner = prompts._arrays_of
    def timed(*args):
        start = time.process_time()
        made = inner(*args)
        spent.append(time.process_time() - start)
        return made
    prompts._arrays_of = timed
    demonstrations.encode = lambda texts, tokenizer, batch_size, cache: [x.tolist() for x in timed(
        texts, tokenizer, False, batch_size, cache)]
    if kind != "stream":
        rows = clocked(times, "load_rows", lambda: load_rows(file))
        kinds = dict(messages=Demonstrations, text=Prompts)
        data = clocked(times, "data", lambda: kinds[kind](rows, Quarters()))
        clocked(times, "first batch", lambda: data.take(64))
        whole = sum(t["cpu"] for t in times.values())
        return dict(seconds=times, tokenising_cpu=round(sum(spent), 2), beyond_cpu=round(whole - sum(spent), 2),
                    rows=len(data), peak_mb=peak(), before_mb=before)
    def opened(): return Stream(load_rows(file, streaming=True), lambda rows: Prompts(rows, Quarters()), window=10_000)
    data = clocked(times, "first batch", lambda: [(d := opened()), d.take(64)][0])
    memory, n, state = {}, 0, None
    def rest():
        nonlocal n, state
        while data.epoch == 0:
            data.take(1000)
            n += 1
            if data.taken // 100_000 != (data.taken - 1000) // 100_000: memory[data.taken // 100_000*100_000] = peak()
            if state is None and data.taken > 0.9*1e6: state = json.loads(json.dumps(data.state_dict()))
    clocked(times, "one pass", rest)
    def again():
        other = opened()
        other.load_state_dict(state)
        return other.take(64)
    if state: clocked(times, "resumed at 90 %, first batch", again)
    return dict(seconds=times, rows=data.taken, before_mb=before, peak_mb_after_rows=memory)


def main():
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--rows", type=int, default=1_000_000)
    ask.add_argument("--cases", nargs="*", default=["text", "messages", "stream"])
    ask.add_argument("--one", nargs=2)
    given = ask.parse_args()
    if given.one: return print(json.dumps(case(*given.one)))
    results = {}
    for kind in given.cases:
        with TemporaryDirectory() as folder:
            file = f"{folder}/rows.jsonl"
            write(file, given.rows//5 if kind == "messages" else given.rows, kind)
            run = subprocess.run([sys.executable, __file__, "--one", file, kind], capture_output=True, text=True)
            if run.returncode: raise SystemExit(run.stderr)
            results[kind] = json.loads(run.stdout) | dict(file_mb=Path(file).stat().st_size//10**6)
            print(kind, json.dumps(results[kind]), flush=True)
    OUT.write_text(json.dumps(dict(machine=machine(), about=__doc__.split("\n\n")[1].replace("\n", " "),
                                   results=results), indent=1) + "\n")


if __name__ == "__main__": main()
