"Modules that not everybody needs who reads a file of tests."
from importlib import import_module


class Lazily:
    "A module that is imported when it is first asked for something: by the worker that runs its tests, and no other."
    def __init__(self, name): self._name = name
    def __getattr__(self, name):
        if name.startswith(("__", "_pytest", "pytest")): raise AttributeError(name)     # pytest asks all that a file names
        return getattr(import_module(self._name), name)
