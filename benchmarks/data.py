"""What preparing data costs: MB of text a second of one core, and whether memory grows with the text.

Generated files of C4's schema (JSON lines, packed) are prepared as a user would, one process each with one thread. The
speed is text over CPU time of the whole process less that of one that prepares almost nothing, so imports and other
programs on the machine do not enter. The text is the documentation of the Python that runs this, shuffled by
paragraphs: C4 has more different words, so expect less there. Last line: one JSON object of figures.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pydoc_data.topics
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from bounds import finish

CODE = """
import resource, sys
from pathlib import Path
from twophase.text.meta import TRAIN
from twophase.text.prepare import Request, prepare
meta = prepare(Request((sys.argv[1],), Path(sys.argv[2]), tokenizer=sys.argv[3], held_out=0.0, train_bytes=2_000_000))
used = resource.getrusage(resource.RUSAGE_SELF)
text = sum(shard.text_bytes for shard in meta.splits[TRAIN])
print(used.ru_utime + used.ru_stime, used.ru_maxrss, text, meta.tokens(TRAIN))
"""
TOKENIZERS = ("mistral", "bpe:8000", "bytes")


def write(path: Path, megabytes: float, seed: int) -> None:
    """A packed file of C4's schema with documents of about 2 kB."""
    source = random.Random(seed)
    paragraphs = [p for text in pydoc_data.topics.topics.values() for p in text.split("\n\n") if p.strip()]
    size = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        while size < megabytes * 1e6:
            text = "\n".join(source.choice(paragraphs) for _ in range(source.randint(1, 12)))
            size += len(text.encode())
            record = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://example.org/{size}"}
            file.write(json.dumps(record) + "\n")


def run(folder: Path, out: Path, tokenizer: str) -> tuple[float, ...]:
    """CPU seconds, peak kB, bytes of text and tokens of a process that prepares a folder."""
    quiet = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [sys.executable, "-c", CODE, str(folder), str(out), tokenizer]
    done = subprocess.run(words, env=os.environ | quiet, capture_output=True, text=True, check=True)
    return tuple(float(word) for word in done.stdout.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=40, help="text of the larger corpus (default 40)")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        sizes = {"tiny": 1, "small": 1, "large": 8}
        for name, files in sizes.items():
            (base / name).mkdir()
            for number in range(files):
                share = 2 if name == "tiny" else options.megabytes / 8
                write(base / name / f"c4-train.{number:05d}-of-00008.json.gz", share, number)
        print(f"{'tokenizer':12}{'MB/s a core':>12}{'bytes a token':>15}{'peak MB':>9}{'at an eighth':>14}")
        for tokenizer in TOKENIZERS:
            measured = {name: run(base / name, base / f"{name}-{tokenizer}", tokenizer) for name in sizes}
            (slow, peak, text, tokens), (start, _, little, _) = measured["large"], measured["tiny"]
            speed, eighth = (text - little) / (slow - start) / 1e6, measured["small"][1]
            print(f"{tokenizer:12}{speed:12.1f}{text / tokens:15.2f}{peak / 1e3:9.0f}{eighth / 1e3:14.0f}", flush=True)
            name = tokenizer.partition(":")[0]
            figures[f"{name}_mb_per_second_per_core"] = round(speed, 2)
            ratio = figures.get("peak_memory_ratio", 0.0)
            figures["peak_memory_ratio"] = round(max(ratio, peak / eighth), 3)
    return finish("data", dict(sorted(figures.items(), key=lambda item: item[0] != "peak_memory_ratio")))


if __name__ == "__main__":
    sys.exit(main())
