"""Small tasks of programming: a comment that says what is wanted, one line that does it, and tests. The data of
code_reward.ipynb, made from a seed."""
import random

WANTED = [("the sum of a and b", "a + b", "a - b"), ("a minus b", "a - b", "a + b"),
          ("the larger of a and b", "max(a, b)", "min(a, b)"), ("the smaller of a and b", "min(a, b)", "max(a, b)"),
          ("a times b", "a * b", "a + b")]
THEN = [("", ""), (", plus 1", " + 1"), (", minus 1", " - 1")]
ARGUMENTS = [(2, 5), (7, 3), (-4, 6)]


def tasks(n, *, seed=0, sloppy=0.5):
    """`n` rows {prompt, completion, tests}. The tests are right; `completion` is a sloppy teacher's, who takes another
    operation in a share `sloppy` of the rows."""
    rng, rows = random.Random(f"{seed}"), []
    for _ in range(n):
        (text, right, wrong), (more, then) = rng.choice(WANTED), rng.choice(THEN)
        expression, said = right + then, (wrong if rng.random() < sloppy else right) + then
        tests = [dict(call="f", args=[a, b], result=eval(expression, dict(a=a, b=b, max=max, min=min)))
                 for a, b in ARGUMENTS]
        rows.append(dict(prompt=f"# {text}{more}\ndef f(a, b): return", completion=f" {said}", tests=tests))
    return rows


def questions(rows):
    "What reinforcement learning sees of the rows: prompts and tests, no demonstrations."
    return [dict(prompt=r["prompt"], tests=r["tests"]) for r in rows]
