"""The peers as they are installed, called as they are: their own functions, on our tensors.

TRL is imported; its formulas stand inside trainers, so a trainer is made without `__init__` and given what the formula
reads (`bare`), or the statements of a method are cut out and run (`statements`). verl and OpenRLHF are read as files:
the packages that they import and arithmetic does not need (Ray, vLLM, DeepSpeed) are replaced by `Stub`s while a file
is read, and are gone afterwards."""
import ast
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT/"tests"))     # where agreement.py is run by itself
from lazily import Lazily  # noqa: E402, F401  trl_rows has it from here

VERSIONS = {name: re.search(rf"^{name}==(.+)$", (ROOT/"constraints.txt").read_text(), re.M)[1]
            for name in ("trl", "verl", "openrlhf")}
BESIDE = Path(sys.prefix)/"peers"  # where `make peers` puts what comes without its dependencies


def folder(name):
    "The folder of an installed package, which is not imported; None if there is none."
    spec = importlib.util.find_spec(name)
    if spec and spec.submodule_search_locations: return Path(spec.submodule_search_locations[0])
    return BESIDE/name if (BESIDE/name/"__init__.py").is_file() else None


def missing(name):
    "Why a peer cannot be compared with, or None: what is wrong and the command that repairs it."
    command = "make dev" if name == "trl" else "make peers"
    place = folder(name)
    if place is None: return f"{name} is not installed: {command} installs {VERSIONS[name]}"
    found = [d.version for d in distributions(path=[str(place.parent)]) if d.metadata["Name"].lower() == name]
    return None if found[:1] == [
        VERSIONS[name]] else f"{name} {found[:1]} is installed, the rows are those of {VERSIONS[name]}: {command}"


# -- files without their dependencies

class Anything:
    "Whatever is asked of it, called or not, is another one."
    def __init__(self, *args, **kwargs): pass
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Anything()
    # also a decorator
    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()


class Stub(ModuleType):
    "A module in which every name is a class."
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        made = type(name, (Anything,), {})
        setattr(self, name, made)
        return made


class Files:
    """Modules of one package, read one by one: `real` files are executed, all else under it and under `stubs` is a
    `Stub`."""
    def __init__(self, package, stubs, real, names=None):
        self.package, self.folder, self.stubs, self.real, self.names = package, folder(
            package), stubs, real, names or {}
        self.kept = {}
        with self.imports():
            for name in real:
                module = importlib.import_module(f"{package}.{name}")
                for other, wanted in self.names.items():
                    for x in wanted:
                        if hasattr(module, x):
                            setattr(importlib.import_module(f"{package}.{other}"), x, getattr(module, x))
                setattr(self, name.rsplit(".")[-1], module)

    def mine(self, name): return name.split(".")[0] in (self.package, *self.stubs)

    def find_spec(self, name, path=None, target=None):
        if not self.mine(name): return None
        inner = name.removeprefix(f"{self.package}.")
        if name.startswith(f"{self.package}.") and inner in self.real:
            return importlib.util.spec_from_file_location(name, self.folder/f"{inner.replace('.', '/')}.py")
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec): return Stub(spec.name)
    def exec_module(self, module): pass

    @contextmanager
    def imports(self):
        """Here the package, real and stubbed, can be imported; also needed where one of its functions imports when
        it is called."""
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if self.mine(name)}
        sys.modules.update(self.kept)
        sys.meta_path.insert(0, self)
        try: yield self
        finally:
            sys.meta_path.remove(self)
            self.kept |= {name: sys.modules.pop(name) for name in list(sys.modules) if self.mine(name)}
            sys.modules.update(hidden)


@cache
def verl():
    files = Files("verl", ("ray", "omegaconf", "tensordict", "codetiming", "hydra"),
                  ("base_config", "utils.groupwise", "utils.torch_functional", "workers.config.actor",
                   "trainer.ppo.core_algos", "trainer.ppo.rollout_corr_helper", "trainer.distillation.fsdp.losses"),
                  {"utils": ("as_torch_index", "group_mean_std"),
                   "workers.config": ("ActorConfig", "PolicyLossConfig")})
    files.rollout_corr_helper.DataProto = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))
    files.losses.get_ulysses_sequence_parallel_world_size = lambda: 1
    return files


def actor_config(**changed):
    "verl's own defaults, but for what is `changed`; nothing is validated, as that asks for a cluster."
    files = verl()
    policy = {k: changed.pop(k) for k in list(changed) if k in {f.name for f in fields(files.actor.PolicyLossConfig)}}
    config = object.__new__(files.actor.ActorConfig)
    made = object.__new__(files.actor.PolicyLossConfig)
    made.__dict__.update(policy)
    config.__dict__.update(dict(global_batch_info={}, policy_loss=made) | changed)
    return config


@cache
def openrlhf():
    return Files("openrlhf", ("ray", "deepspeed", "vllm", "peft"),
                 ("models.utils", "models.loss", "trainer.ppo_utils.kl_controller", "trainer.ppo_utils.length_penalty",
                  "trainer.ppo_utils.experience_maker"))


# -- TRL

class Accelerator:
    "One process."
    device, num_processes, process_index, sync_gradients, parallelism_config = torch.device("cpu"), 1, 0, True, None
    def gather(self, x): return x
    gather_for_metrics = unwrap_model = gather
    def reduce(self, x, reduction="sum"): return x
    def pad_across_processes(self, x, dim=0, pad_index=0): return x


def defaults(config, **changed):
    "The default of every field of a configuration class, but for what is `changed`; its checks are not run."
    return SimpleNamespace(**{f.name: f.default for f in fields(config)} | changed)


def bare(trainer, **attributes):
    "A trainer that has not been set up: what its loss reads, and nothing else."
    made = object.__new__(trainer)
    made.__dict__.update(dict(accelerator=Accelerator(), model=SimpleNamespace(training=True), aux_loss_enabled=False,
                              _total_train_tokens=0, _tp_size=1, current_gradient_accumulation_steps=1,
                              _metrics=defaultdict(lambda: defaultdict(list)), stats=defaultdict(list)) | attributes)
    return made


def _executed(code, around, **names):
    names = around | names
    exec(code, names)
    return SimpleNamespace(**names)


@cache
def statements(function, first, last):
    """The statements of `function` from the one that begins with `first` to the one that begins with `last`, as a
    function of the names they read -> all names."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    starts = lambda node, text: ast.unparse(node).startswith(text)
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, part, None) for part in ("body", "orelse")):
            if not isinstance(body, list): continue
            begin = next((i for i, x in enumerate(body) if starts(x, first)), None)
            end = None if begin is None else next((i for i, x in enumerate(body[begin:], begin) if starts(x, last)),
                                                  None)
            if end is None: continue
            code = compile(ast.Module(body[begin:end + 1], type_ignores=[]),
                           inspect.getsourcefile(inspect.unwrap(function)), "exec")
            return partial(_executed, code, inspect.unwrap(function).__globals__)
    raise LookupError(f"{function.__qualname__} has no statements from {first!r} to {last!r}: the peer has changed")
