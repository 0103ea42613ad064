"Modules that not everybody needs who reads a file of tests."
from importlib import import_module


class Lazily:
    "A module that is imported when it is first asked for something: by the worker that runs its tests, and no other."
    def __init__(self, name): self._name = name
    def __getattr__(self, name):
        if name.startswith(("_", "pytest")): raise AttributeError(name)     # pytest asks that of all a file names
        return getattr(import_module(self._name), name)
