"Real data for the tutorials, where it lies beside the repository; none of it is part of the repository."
import gzip
import json
import random
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2]/"shared"/"data"
MODEL = str(SHARED/"models/stories260K")   # a small pretrained Llama: 260,032 weights, 512 tokens, stories


def there():
    "Whether the data is here; says so when it is not."
    if SHARED.is_dir(): return True
    print(f"{SHARED} is absent: this cell runs on real data, which is not part of the repository. Everything above "
          "is complete without it.")
    return False


def read(name, *, seed=0):
    "Rows of one file in an order made from a seed."
    with gzip.open(SHARED/f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(seed).shuffle(rows)
    return rows


def question(row):
    "What was said so far, as plain text: the model knows no chat template."
    return "\n\n".join(m["content"] for m in row["prompt"]) + "\n"
