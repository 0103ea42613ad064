"""Arithmetic in words in several steps: problems, solutions that err now and then, and who judges each step. Data of
the tutorial on process rewards, made from a seed."""
import random

from word_problems import NAMES, THINGS


def problems(n, *, seed=0, held_out=False, slips=0.25):
    """`n` rows {prompt, moves, completion}. The solution has a line for each move, and errs in a share `slips` of
    them: it adds where the story takes away, or miscounts by one. No text is both among the held-out problems and the
    others."""
    rng, rows = random.Random(f"steps {seed} {held_out}"), []
    while len(rows) < n:
        start = total = rng.randint(1, 4)
        moves = []
        for _ in range(rng.randint(2, 3)):
            move = rng.choice([m for m in (-2, -1, 1, 2) if 0 <= total + m <= 5])
            moves.append(move)
            total += move
        prompt = f"{rng.choice(NAMES)} has {start} {rng.choice(THINGS)}, {', '.join(map(told, moves))}.\n"
        if (random.Random(prompt).random() < .2) != held_out: continue
        rows.append(dict(prompt=prompt, start=start, moves=moves,
                         completion="".join(sloppy(start, moves, rng, slips))))
    return rows


def told(move): return f"finds {move}" if move > 0 else f"loses {-move}"
def line(move, start, done, end): return f"{told(move)}: {start}{done:+}={end}\n"


def sloppy(start, moves, rng, slips):
    "A solution, line by line; what comes after a slip goes on from it."
    for move in moves:
        slip = rng.random() < slips and rng.choice(["turned", "miscounted"])
        done = -move if slip == "turned" else move
        end = max(0, start + done + (rng.choice([-1, 1]) if slip == "miscounted" else 0))
        yield line(move, start, done, end)
        start = end


def judged(steps, start, moves):
    "A label a step: True up to the first mistake, which is False; None behind it, as nobody reads on."
    labels, total = [], start
    for k, step in enumerate(steps):
        move = moves[k] if k < len(moves) else 0
        labels.append(step == line(move, total, move, total + move))
        if not labels[-1]: break
        total += move
    return labels + [None]*(len(steps) - len(labels))


def solved(steps, start, moves):
    "Whether the last number is the right one, however it came about, and there is a line for each move."
    return len(steps) == len(moves) and steps[-1].strip().split("=")[-1] == str(start + sum(moves))
