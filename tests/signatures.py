"""Every public name with its parameters, a line each. `python tests/signatures.py` writes tests/signatures.txt, which
`tests/test_signatures.py` compares with what is there."""
import inspect
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


def default(x):
    "A default as its author wrote it, or … for an object or a long text."
    plain = x is inspect.Parameter.empty or isinstance(x, int | float | str | tuple | None)
    return x if plain and len(repr(x)) <= 60 else ...


def parameters(f, *, bound=False):
    "`(a, b, *, c=1)` of a function: without annotations, which may become wider; `bound` leaves `self` out."
    parts = inspect.signature(f).parameters.values()
    given = [p.replace(annotation=p.empty, default=default(p.default)) for p in parts]
    return str(inspect.Signature(given[bound:])).replace("Ellipsis", "…")


def members(cls):
    "`name(parameters)` of the public methods and properties, inherited ones too."
    for name in sorted(n for n in dir(cls) if not n.startswith("_")):
        x = inspect.getattr_static(cls, name)
        if isinstance(x, staticmethod): yield name + parameters(x.__func__)
        elif isinstance(x, classmethod): yield name + parameters(x.__func__, bound=True)
        elif inspect.isfunction(x): yield name + parameters(x, bound=True)
        else: yield name


def lines():
    "All names that `from rlblocks import …` offers, in alphabetical order, and below each class its members."
    import rlblocks
    for name in sorted(rlblocks.__all__):
        x = getattr(rlblocks, name)
        if inspect.isclass(x):
            own = x.__module__.startswith("rlblocks.")      # not what a name of typing or an alias stands for
            made = inspect.isfunction(x.__init__) and not getattr(x, "_is_protocol", False)
            yield name + (parameters(x.__init__, bound=True) if made else "")
            if own: yield from (f"{name}.{member}" for member in members(x))
        else: yield name + (parameters(x) if inspect.isfunction(x) else "")


def render(): return "\n".join(lines()) + "\n"


if __name__ == "__main__": FILE.write_text(render(), encoding="utf-8")
