"Name, version, requirements and extras live once, in settings.ini; this file hands them to setuptools."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
meta = ini["DEFAULT"]
extras = {name: line.split() for name, line in ini["extras"].items() if name not in meta}

setup(
    name=meta["name"],
    version=meta["version"],
    description=meta["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=meta["author"],
    license=meta["license"],
    keywords=meta["keywords"],
    python_requires=f">={meta['min_python']}",
    packages=find_packages(include=["rlblocks", "rlblocks.*"]),
    package_data={"rlblocks": ["py.typed", "plots.mplstyle"]},
    install_requires=meta["requirements"].split(),
    extras_require=extras,
    # vLLM's own processes, where it has some, learn how weights come
    entry_points={"vllm.general_plugins": ["rlblocks = rlblocks.samplers.vllm_process:register"],
                  "console_scripts": ["rlblocks = rlblocks.people.command:command_line"]},
)
