"On what a benchmark ran: it stands beside every result."
import os
import platform
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import torch


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())
    return dict(date=datetime.now().isoformat(timespec="seconds"), torch=torch.__version__, cpu=cpu,
                transformers=version("transformers"), python=platform.python_version(), cores=os.cpu_count(),
                threads=torch.get_num_threads(), load=os.getloadavg())
