"""Everything that wants a GPU, in one go: speed, engine, a shortened run of the paper's model, a small sweep.

    python benchmarks/gpu.py --out runs/gpu                 all parts, some 20 minutes on one H200
    python benchmarks/gpu.py --out runs/gpu --parts speed   one of: speed, engine, run, sweep, policies
    python benchmarks/gpu.py --out runs/gpu --tiny          the same commands with a toy model on a CPU, to try them

* `speed`: `lm_throughput.py`.
* `engine`: `engine_overhead.py --recipe paper_150m` at S = 1 and 16.
* `run`: `paper_150m` with two replicas in this process, shortened, on the documentation of the running Python as bytes
  (prepared C4 with `--corpus tokens:DIR`); draws its loss curve. A text of three million bytes is soon known by heart:
  the curve shows that training works, not how well the model would do on C4.
* `sweep`: `nano`, heavy ball and Nesterov, without restarts and with K=3, over outer learning rate and momentum, with
  the controls; draws the heatmaps.
* `policies`: `nano` at momentum 0.9, both rules, without restarts, with K=3 and 7, and `auto`, over outer learning rate
  and two seeds, with the controls.

What each printed lies in OUT/NAME.log; a part that is done is not done again. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TINY = (
    "--device cpu --model.layers 1 --model.hidden-size 32 --model.intermediate-size 88 --model.heads 2 "
    "--data.sequence-length 32 --data.batch-size 4 --data.validation-windows 8 --compute.no-compile"
).split()


def text(corpus: str) -> list[str]:
    if corpus.startswith("tokens:"):
        return ["--data.corpus", corpus, "--repeat"]
    return ["--data.corpus", corpus, "--data.vocabulary", "bytes", "--data.tokenizer", ""]


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each part."""
    twophase = [sys.executable, "-m", "twophase"]
    tiny = TINY if options.tiny else []
    steps = ["--steps", "24", "--inner-steps", "8"] if options.tiny else ["--steps", "400", "--inner-steps", "25"]
    run = ["--out", str(options.out / "run"), "--recipe", "paper_150m", *text(options.corpus), *steps]
    run += ["--outer.restart", "3", "--evaluate-every", "4", "--log-every", "5", *tiny]
    short = ["--steps", "16", "--inner-steps", "4"] if options.tiny else ["--steps", "480", "--inner-steps", "16"]
    axes = ["--axis", "outer.nesterov", "false", "true", "--axis", "outer.restart", "never", "3"]
    axes += ["--axis", "outer.momentum", "0.5", "0.9", "--axis", "outer.lr", "0.3", "0.7", "1.1"]
    sweep = ["--out", str(options.out / "sweep"), "--recipe", "nano", *text(options.corpus), *short, *axes]
    quiet = ["--controls", "--workers", "1", "--yes", "--evaluate-every", "0", "--log-every", "0", *tiny]
    axes = ["--axis", "outer.nesterov", "false", "true", "--axis", "outer.restart", "never", "3", "7", "auto"]
    axes += ["--axis", "outer.lr", "0.3", "0.7", "1.1", "--axis", "seed", "0", "1"]
    policies = ["--out", str(options.out / "policies"), "--recipe", "nano", *text(options.corpus), *short, *axes]
    engine = ["--recipe", "nano" if options.tiny else "paper_150m", "--inner-steps", "1", "16"]
    engine += ["--device", "cpu", "--seconds", "1", "--block", "1"] if options.tiny else ["--seconds", "40"]
    return {
        "speed": [sys.executable, str(HERE / "lm_throughput.py"), *(["--seconds", "2"] if options.tiny else [])],
        "run": [*twophase, "train", *run],
        "engine": [sys.executable, str(HERE / "engine_overhead.py"), *engine],
        "sweep": [*twophase, "sweep", *sweep, *quiet],
        "policies": [*twophase, "sweep", *policies, *quiet],
    }


def loss_curve(run: Path, stem: Path) -> dict[str, float]:
    """Draw a run's training and validation loss, and return its last numbers."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - only this part draws

    def lines(name: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (run / name).read_text().splitlines()]

    steps = lines("steps.jsonl")
    judged = [line for line in lines("metrics.jsonl") if line.get("validation_loss") is not None]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([s["step"] for s in steps], [s["train_loss"] for s in steps], label="training, mean since the last point")
    axes.plot([s["step"] for s in judged], [s["validation_loss"] for s in judged], "o", label="validation (anchor)")
    axes.set(xlabel="inner step", ylabel="loss, nats a token")
    axes.legend()
    for ending in ("png", "pdf"):
        figure.savefig(stem.with_suffix(f".{ending}"))
    rows = ["step,train_loss,tokens_per_second,flops_per_second,flops_per_second_palm,peak_memory_bytes"]
    rows += [",".join(str(line[key]) for key in rows[0].split(",")) for line in steps]
    stem.with_suffix(".csv").write_text("\n".join(rows) + "\n")
    middle = sorted(line["tokens_per_second"] for line in steps)[len(steps) // 2]
    return {"run_tokens_per_second": middle, "run_validation_loss": judged[-1]["validation_loss"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--parts", nargs="+", choices=["speed", "engine", "run", "sweep", "policies"], help="default: all"
    )
    parser.add_argument("--corpus", default="python", help="python, file:PATH or tokens:DIR (default python)")
    parser.add_argument("--tiny", action="store_true", help="a toy model on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    status = 0
    for name, command in commands(options).items():
        if options.parts and name not in options.parts:
            continue
        log, done = options.out / f"{name}.log", options.out / f"{name}.done"
        if not done.exists():
            print(f"== {name}: {' '.join(command)}", flush=True)
            with log.open("w", encoding="utf-8") as file:
                code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
            if code:
                print(f"{name} ended with status {code}; the end of {log}:\n{log.read_text()[-2000:]}")
                status = 1
                continue
            done.touch()
        last = log.read_text().splitlines()[-1]
        if last.startswith("{"):
            figures |= json.loads(last)
        elif name == "run":
            figures |= loss_curve(options.out / "run", options.out / "loss-curve")
        print(f"{name}: {last}")
    print(json.dumps(figures))
    return status


if __name__ == "__main__":
    sys.exit(main())
