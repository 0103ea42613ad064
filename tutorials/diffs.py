"A loop with other lines: how the tutorials run what they show as a diff."
import difflib
import inspect
import linecache
import re


def changed(loop, *changes, name=None, **more):
    """`loop` with lines exchanged, and the diff. Each change is (lines that are there, lines in their place), without
    their indentation, which stays that of the first. `more`: what the new lines need beside the imports of the loop.

    ValueError for lines that are not there exactly once: the loop has changed, and so must the diff."""
    old = inspect.getsource(loop)
    lines = old.splitlines()
    for before, after in changes:
        found = places(lines, want := before.splitlines())
        if len(found) != 1:
            raise ValueError(f"{name or 'changed'}: {loop.__name__} has these lines {len(found)} times, once is "
                             f"wanted:\n{before}")
        at, = found
        indent = re.match(" *", lines[at])[0]
        lines[at:at + len(want)] = [indent + line if line else line for line in after.splitlines()]
    new = "\n".join(lines) + "\n"
    scope, file = loop.__globals__ | more, f"<{loop.__name__} {name or len(linecache.cache)}>"
    linecache.cache[file] = len(new), None, new.splitlines(True), file
    exec(compile(new, file, "exec"), scope)
    hunks = re.split("(?m)^@@.*\n", "\n".join(difflib.unified_diff(old.splitlines(), lines, n=0, lineterm="")))[1:]
    return scope[loop.__name__], "\n".join(shown(hunk.splitlines()) for hunk in hunks)


def shown(hunk):
    "Lines of a diff without the indentation that they have in common."
    depth = min(len(line[1:]) - len(line[1:].lstrip()) for line in hunk if line[1:].strip())
    return "\n".join(f"{line[0]} {line[1 + depth:]}" for line in hunk)


def places(lines, want):
    "Where `want` stands in `lines`, whatever the indentation."
    bare = [line.strip() for line in lines]
    want = [line.strip() for line in want]
    return [i for i in range(len(bare) - len(want) + 1) if bare[i:i + len(want)] == want]
