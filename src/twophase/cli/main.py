"""The command line: `twophase demo | train | data | export | sweep | sweep-worker | report | spectrum | ...`.

Each command is a plain function of its words. Commands import what they need when they run, so that `--help` answers
without torch. Exit status: 0 done; 1 a failure while running (a single run that diverged included); 2 a mistake in
what was asked, told in one message; 130 or 143 stopped by Ctrl-C or SIGTERM, resumable by the same command.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twophase.base.config import RunError, UsageError

if TYPE_CHECKING:
    from twophase.sweep.grid import Sweep
    from twophase.sweep.table import Row
    from twophase.training.config import TrainConfig

_PROGRAM = "twophase"
_COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("_demo", "train a small language model over a grid, with and without restarts, and draw it"),
    "train": ("_train", "one run; repeat the command to resume it"),
    "data": ("_data", "turn text into token shards once, for all runs that train on it"),
    "export": ("_export", "write a run's model as a Hugging Face folder, with its tokenizer"),
    "sweep": ("_sweep", "a grid of runs; repeat the command to resume it"),
    "report": ("_report", "a run or a sweep as one HTML page; of a sweep also the verdict, each arm against controls"),
    "diagnose": ("_diagnose", "does a run's outer loop oscillate, overshoot or lag, and what the theory suggests"),
    "spectrum": ("_spectrum", "curvature of a trained run by block, what a round removes of it, and a period for each"),
    "period": ("_period", "when to restart a rule on a spectrum, what it gains, and where it cannot help"),
    "explore": (
        "_explore",
        "write an interactive page (one file): what restarts do while you move the hyperparameters",
    ),
    "study": ("_study", "check a claim of the theory: compute it, draw it, say what holds and what does not"),
    "doctor": ("_doctor", "the machine, the versions, the devices, what is missing and how to get it"),
    "sweep-worker": ("_sweep_worker", "one more worker for a sweep that was started elsewhere, here or on any machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        from twophase import __version__

        print(f"{_PROGRAM} {__version__}")
        return 0
    name, *rest = words
    if name not in _COMMANDS:
        return _complain(_PROGRAM, f"{name!r} is no command; choose from {', '.join(_visible())}")
    try:
        return globals()[_COMMANDS[name][0]](rest)
    except UsageError as error:
        return _complain(f"{_PROGRAM} {name}", str(error))
    except KeyboardInterrupt:
        return _interrupted(words)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RunError) as error:
        return _complain(f"{_PROGRAM} {name}", str(error), "failed", status=1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which only some commands import
            raise
        reason = str(error).splitlines()[0]
        return _complain(
            f"{_PROGRAM} {name}",
            f"weights and optimizers do not fit into the device's memory ({reason}); give a smaller model, fewer "
            "--replicas, or a GPU to each by torchrun; what has been saved is intact",
            "failed",
            status=1,
        )


def _visible() -> list[str]:
    return [name for name, (_, text) in _COMMANDS.items() if text]


def _overview() -> str:
    lines = [f"  {name:12} {_COMMANDS[name][1]}" for name in _visible()]
    return "\n".join(
        [
            f"usage: {_PROGRAM} COMMAND [OPTIONS]",
            "",
            "Two-phase training (DiLoCo, local SGD) with outer momentum that knows when to forget.",
            "",
            *lines,
            "",
            f"{_PROGRAM} COMMAND --help lists a command's options.",
        ]
    )


def _complain(where: str, text: str, what: str = "error", status: int = 2) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # Every process meets most mistakes, and torchrun ends the others when one has ended: let the first speak.
        time.sleep(2)
        where = f"{where} (process {rank})"
    print(f"{where}: {what}: {text}", file=sys.stderr)
    return status


def _interrupted(words: Sequence[str]) -> int:
    print(f"stopped; resume with: {_command(words)}", file=sys.stderr)
    return 130


def _command(words: Sequence[str]) -> str:
    """The command line that was given, as it can be given again from here."""
    script = Path(sys.argv[0])
    start = ["python", "-m", _PROGRAM] if script.name == "__main__.py" else [sys.argv[0]]
    return shlex.join([*start, *words])


# ----------------------------------------------------------------------------------------------------------- options


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {command}", description=_COMMANDS[command][1], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results; an unfinished one is resumed")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe", metavar="NAME", help="start from a recipe's values: paper_150m, small, nano; files and options win"
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file with values; several are laid over each other, options win",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")


def _train_config(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, TrainConfig]:
    """Our own options and, from YAML files and all other options, the configuration."""
    from twophase.base.config import check_tree, load_yaml, parse_arguments, to_arguments
    from twophase.recipes.pretraining import at_pace, recipe
    from twophase.training.config import TrainConfig, check

    if "-h" in words or "--help" in words:
        parser.print_help()
        print("\nand the values of the configuration:\n")
        parse_arguments(TrainConfig(), ["--help"], prog=parser.prog)
    options, rest = parser.parse_known_args(words)
    config = recipe(options.recipe) if options.recipe else TrainConfig()
    given = list(rest)
    for path in options.config:
        tree = load_yaml(path)
        check_tree(tree, config, f"--config {path}")
        config = parse_arguments(config, to_arguments(tree), prog=f"{parser.prog} --config {path}")
        given += to_arguments(tree)
    config = parse_arguments(config, rest, prog=parser.prog)
    if options.recipe:
        named = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in given}
        config = at_pace(config, keep=named)
    return options, check(config)


# ------------------------------------------------------------------------------------------------------------- train


def _train(words: list[str]) -> int:
    from twophase.base.config import dump_yaml, fingerprint
    from twophase.runs.folder import read_summary

    parser = _parser("train")
    _config_options(parser)
    parser.add_argument(
        "--track",
        nargs="+",
        default=[],
        metavar="TRACKER",
        help="send the metrics to tensorboard, trackio or wandb as well; the run does not depend on them",
    )
    _elastic_options(parser)
    options, config = _train_config(parser, words)
    if options.print_config:
        print(dump_yaml(config, every=True), end="")
        return 0
    out = options.out or Path("runs") / fingerprint(config)
    _check_elastic(options)
    if options.lighthouse is not None:
        out = out / f"replica-{options.replica}"  # each is a run of its own, wherever its machine is
    summary = read_summary(out, fingerprint(config)) or _train_run(out, config, options)
    lead = os.environ.get("RANK", "0") == "0"
    if summary["exit_reason"] == "stopped":
        if lead:
            _interrupted(["train", *words])
        return summary["status"]
    if lead:
        print(_describe_run(out, config, summary))
    return 1 if summary["diverged"] else 0


def _elastic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas that come and go (extra twophase[ft])")
    group.add_argument("--lighthouse", metavar="URL", help="of torchft_lighthouse, such as http://10.0.0.1:29510")
    group.add_argument("--replica", type=int, metavar="N", help="the number of this replica, from 0")
    group.add_argument(
        "--host",
        metavar="ADDRESS",
        help="of the interface to listen on; a private one (127.0.0.1)",
    )
    group.add_argument("--min-replicas", type=int, metavar="N", help="replicas that a run needs to begin (all of them)")
    group.add_argument(
        "--sync-timeout",
        type=float,
        metavar="S",
        help="seconds for a heal or a reduction (120); also under torchrun (600 on GPUs, 1800 without)",
    )
    group.add_argument("--quorum-timeout", type=float, metavar="S", help="seconds for the slowest's inner steps (3600)")
    group.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds to wait for the others to begin, also under torchrun (600)",
    )


def _check_elastic(options: argparse.Namespace) -> None:
    names = ("replica", "host", "min_replicas", "quorum_timeout")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if options.lighthouse is None and given:
        raise UsageError(
            f"{given[0]} is for replicas that come and go, and --lighthouse is missing; give the URL of "
            "torchft_lighthouse, such as --lighthouse http://127.0.0.1:29510"
        )
    if options.lighthouse is not None and options.replica is None:
        raise UsageError("--replica is missing; with --lighthouse each replica has a number of its own, from 0")


def _train_run(out: Path, config: TrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Train what is not finished yet."""
    from twophase.base.config import to_tree
    from twophase.base.progress import meter, round_text, step_text
    from twophase.runs.trackers import check, tracked
    from twophase.tasks.build import build_task
    from twophase.training.preflight import preflight
    from twophase.training.session import claimed, communication, signals, take_device, world_size
    from twophase.training.train import train

    check(options.track)
    take_device(config)
    task = build_task(config)
    preflight(config, task, world_size())  # before a folder is made for what cannot be run
    with (
        communication(config, options) as communicator,
        signals() as stopped,
        claimed(out, config, communicator) as folder,
        tracked(
            folder, options.track, run_name=out.name, config=to_tree(config), lead=communicator.rank == 0
        ) as recorder,
    ):
        with meter("train", config.steps, quiet=options.quiet or communicator.rank > 0) as show:
            summary = train(
                task,
                config,
                recorder,
                communicator=communicator,
                on_round=lambda line: show(line["step"], round_text(line)),
                on_step=lambda line: show(line["step"], step_text(line)),
                should_stop=stopped.is_set,
            )
        return summary | {"status": 128 + stopped.number}


def _data(words: list[str]) -> int:
    from twophase.cli.data import main

    return main(words)


def _export(words: list[str]) -> int:
    from twophase.tasks.lm.export import main

    return main(words)


def _describe_run(out: Path, config: TrainConfig, summary: dict[str, Any]) -> str:
    restart = ", ".join(config.sync.restart) or config.outer.policy()  # each fragment's own, or one for all
    head = f"{out}: {config.outer.rule().describe()}, restart {restart}, S = {config.inner_steps}"
    if summary["diverged"]:
        return f"{head}: diverged at step {summary['steps']} of {config.steps}"
    per_byte = summary["perplexity_per_byte"]
    known = "" if per_byte is None or math.isnan(per_byte) else f" ({per_byte:.3f} a byte)"
    return (
        f"{head}: validation perplexity {summary['perplexity']:.3f} a token{known}, "
        f"{summary['rounds']} rounds, {summary['restarts']} restarts, {summary['seconds']:.1f} s"
    )


# ------------------------------------------------------------------------------------------------------------- sweeps


def _sweep(words: list[str]) -> int:
    from twophase.base.config import dump_yaml
    from twophase.cli.sweeping import add_options, run, take_slurm_options
    from twophase.recipes.arms import controls, in_arms
    from twophase.sweep.grid import Sweep, parse_axes
    from twophase.training.config import check

    parser = _parser("sweep")
    _config_options(parser)
    add_options(parser)
    parser.add_argument(
        "--axis",
        nargs="+",
        action="append",
        default=[],
        metavar=("PATH VALUE", "VALUE"),
        help="an axis of the grid and its values, such as --axis outer.lr 0.3 0.7 or --axis outer.restart never 3; a "
        "set of words is one value, with commas between them: --axis sync.restart none a=3,b=loss",
    )
    parser.add_argument(
        "--controls",
        action="store_true",
        help="add what restarts should be judged against: momentum-free runs, plain averaging, and for each run "
        "with scheduled restarts one without at the same mean outer gain",
    )
    rest, slurm = take_slurm_options(words)
    options, config = _train_config(parser, rest)
    if options.print_config:
        print(dump_yaml(config, every=True), end="")
        return 0
    if not options.axis:
        raise UsageError(
            "no --axis; name at least one, for example --axis outer.lr 0.3 0.7 --axis outer.restart never 3"
        )
    axes = parse_axes(options.axis, config)
    cells = in_arms(config, axes)
    for cell in cells:
        check(cell.config)
    cells += controls(config, axes, cells) if options.controls else []
    sweep = Sweep("sweep", config, cells)
    out = options.out or Path("runs") / "sweep"
    return run(sweep, out, options, repeat=_command(["sweep", *words]), results=_sweep_results, slurm=slurm)


def _demo(words: list[str]) -> int:
    from twophase.cli.sweeping import add_options, run, take_slurm_options
    from twophase.recipes.demo import demo

    parser = _parser("demo")
    add_options(parser)
    parser.add_argument("--quick", action="store_true", help="a smaller grid of shorter runs, under two minutes")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        metavar="SEED",
        help="seeds, 82 runs each, or 60 without controls (0)",
    )
    parser.add_argument("--no-controls", action="store_true", help="leave out the control runs")
    rest, slurm = take_slurm_options(words)
    options = parser.parse_args(rest)
    sweep = demo(quick=options.quick, seeds=options.seeds, controls=not options.no_controls)
    out = options.out or Path("runs") / ("demo-quick" if options.quick else "demo")
    return run(sweep, out, options, repeat=_command(["demo", *words]), results=_demo_results, slurm=slurm)


def _sweep_results(rows: list[Row], sweep: Sweep, out: Path) -> str:
    from twophase.figures.overview import describe, draw
    from twophase.rule import FORM_WORDS

    forms = sorted({config.outer.form for config in sweep.runs.values()})
    form = " and ".join(FORM_WORDS[form] for form in forms)
    more = f"what each arm is worth, and against the controls: {_PROGRAM} report {out}"
    return f"{describe(rows)}\n{_figures(draw(rows, form, out / 'figures'), out)}\n{more}"


def _demo_results(rows: list[Row], sweep: Sweep, out: Path) -> str:
    from twophase.studies._demo import draw, verdict

    return f"\n{verdict(rows, sweep)}\n\n{_figures(draw(rows, sweep, out / 'figures'), out)}"


def _figures(paths: list[Path], out: Path) -> str:
    pictures = [str(path) for path in paths if path.suffix == ".png"]
    return f"table {out / 'cells.csv'}" + "".join(f"\nfigure {picture}" for picture in pictures)


def _report(words: list[str]) -> int:
    from twophase.cli.report import WATCH_SECONDS, Wish, report
    from twophase.judge.verdict import WITHIN

    parser = argparse.ArgumentParser(prog=f"{_PROGRAM} report", description=_COMMANDS["report"][1], allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="RUN|SWEEP", help="folder of the run or sweep, its --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write (report.html in the folder)")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=WATCH_SECONDS,
        metavar="SECONDS",
        help=f"write the page again every so many seconds while the run goes on ({WATCH_SECONDS:g}); it then shows the "
        "newest by itself, until that is switched off on it",
    )
    parser.add_argument("--runs", action="store_true", help="of a sweep: also write the report of each of its runs")
    parser.add_argument(
        "--within",
        type=float,
        nargs="+",
        default=WITHIN,
        metavar="X",
        help="of a sweep: distances from the best of all that robustness areas are given for, relative "
        f"(default {' '.join(map(str, WITHIN))})",
    )
    parser.add_argument(
        "--controls",
        nargs="+",
        default=(),
        metavar="ARM",
        help="of a sweep: further arms to compare the others with, besides linked and momentum-free ones",
    )
    parser.add_argument(
        "--where",
        nargs="+",
        default=(),
        metavar="PATH=VALUE",
        help="of a sweep: judge only the cells with these values, such as inner_steps=20",
    )
    options = parser.parse_args(words)
    for word in options.where:
        if "=" not in word:
            raise UsageError(f"--where {word}: write a path and a value, such as inner_steps=20")
    where = tuple(dict(word.split("=", 1) for word in options.where).items())
    within, controls = tuple(options.within), tuple(options.controls)
    known = _config_paths()
    return report(Wish(options.folder, options.out, options.watch, options.runs, within, controls, where, known))


def _config_paths() -> frozenset[str]:
    """Dotted paths of all values that a run's configuration has in this version."""
    from twophase.base.config import values_of
    from twophase.training.config import TrainConfig

    return frozenset(values_of(TrainConfig()))


def _diagnose(words: list[str]) -> int:
    import json

    import twophase.studies.policies  # noqa: F401 - the run of a study may name a policy of it
    from twophase.advice.text import describe
    from twophase.advice.verdict import as_json, check_run, diagnose
    from twophase.runs.record import read_record

    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} diagnose", description=_COMMANDS["diagnose"][1], allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, its --out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    options = parser.parse_args(words)
    record = read_record(options.run, _config_paths())
    check_run(record)
    found = diagnose(record)
    print(json.dumps(as_json(found), indent=2, allow_nan=False) if options.json else describe(found, str(options.run)))
    return 0


def _spectrum(words: list[str]) -> int:
    from twophase.cli.spectrum import Wish, spectrum

    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} spectrum", description=_COMMANDS["spectrum"][1], allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, its --out")
    parser.add_argument(
        "--blocks",
        nargs="+",
        default=(),
        metavar="NAME=PATTERN",
        help="a parameter is in the first block whose pattern its name contains (default: the run's named fragments, "
        "else embeddings, attention, mlp, norms, head)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=4,
        metavar="N",
        help="of the run's training text, of its own batch size (%(default)s)",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="eigenvalues of each block found one by one (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of spectrum.png, .pdf, .csv and .json (the run's own)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    blocks = tuple(options.blocks)
    return spectrum(
        Wish(
            options.run,
            blocks,
            options.batches,
            options.top,
            options.out,
            options.json,
            options.quiet,
            _config_paths(),
        )
    )


def _doctor(words: list[str]) -> int:
    from twophase.cli.doctor import answer

    parser = argparse.ArgumentParser(prog=f"{_PROGRAM} doctor", description=_COMMANDS["doctor"][1], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    text, status = answer(as_object=parser.parse_args(words).json)
    print(text)
    return status


# ------------------------------------------------------------------------------------------------------------- theory


def _known(parser: argparse.ArgumentParser, words: list[str], then: str) -> tuple[argparse.Namespace, list[str]]:
    """A command's own options, and the words that are values of a dataclass, whose help follows this one's."""
    if "-h" in words or "--help" in words:
        parser.print_help()
        print(f"\n{then}\n")
    return parser.parse_known_args(words)


def _period(words: list[str]) -> int:
    from twophase.advice.period import Question, answer, describe, to_json
    from twophase.base.config import parse_arguments
    from twophase.figures.period import check_ending, draw

    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} period", description=_COMMANDS["period"][1], allow_abbrev=False, add_help=False
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the oscillation, and rate and loss against the period, into FILE (.png or .pdf; numbers as .csv)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    options, rest = _known(parser, words, "and the question:")
    if options.plot:
        check_ending(options.plot)
    advice = answer(parse_arguments(Question(), rest, prog=parser.prog))
    print(to_json(advice) if options.json else describe(advice), flush=True)
    if options.plot:
        paths = draw(advice, options.plot)
        if not options.json:
            print("figure " + ", numbers ".join(map(str, paths)))
    return 0


def _explore(words: list[str]) -> int:
    from twophase.base.config import parse_arguments
    from twophase.cli.explore import Question, of_run, state_of, write
    from twophase.explorer.from_run import read_run

    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} explore", description=_COMMANDS["explore"][1], allow_abbrev=False, add_help=False
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("explore.html"),
        help="the page (%(default)s); nothing else is needed",
    )
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="begin with this run's rule, length and estimated effective progress"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    options, rest = _known(parser, words, "and where it begins; everything can be moved on the page:")
    run = read_run(options.run) if options.run else None
    asked = parse_arguments(of_run(run) if run else Question(), rest, prog=parser.prog)
    state = state_of(asked, run)
    size = write(options.out, state, run)
    print(f"page {options.out} ({size / 1000:.0f} kB): open it in a browser; it needs no network")
    if run and state.spectrum == "run":
        print(f"spectrum of {run.spectrum.name}: {run.spectrum.note}")
    elif run and run.problems:
        print(f"{run.spectrum.name}: {run.problems}")
    if options.open:
        import webbrowser

        webbrowser.open(options.out.resolve().as_uri())
    return 0


def _study(words: list[str]) -> int:
    from twophase.cli.sweeping import add_workers, watched, workers_of
    from twophase.studies.study import load, questions, run, so_far

    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} study", description=_COMMANDS["study"][1], allow_abbrev=False, epilog="--list shows the names"
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="of the study")
    parser.add_argument("--list", action="store_true", help="list the studies and their questions, and stop")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("runs") / "studies",
        help="folder of NAME.png, .pdf, .csv and .json (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="coarser and faster")
    parser.add_argument(
        "--scale", metavar="NAME", help="of a study that trains: laptop (default), or paper, the paper's own, for GPUs"
    )
    parser.add_argument(
        "--so-far",
        type=int,
        nargs="*",
        metavar="SEED",
        help="of a study that trains: what it says of the runs that have ended by now, of these seeds or those with the"
        " most whole arms; trains and writes nothing",
    )
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="tables (cells.csv) of runs of this study that were trained elsewhere; then nothing is trained here, and"
        " without --so-far every run must have ended",
    )
    add_workers(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args(words)
    if options.list:
        found = questions()
        width = max(map(len, found))
        print("\n".join(f"{name:{width}}  {question}" for name, question in found.items()))
        return 0
    if options.name is None:
        raise UsageError(f"name a study: {', '.join(questions())}")
    print(load(options.name).QUESTION, flush=True)
    if options.so_far is not None:
        where = {"scale": options.scale, "seeds": options.so_far, "tables": options.table}
        print(f"\n{so_far(options.name, options.out, options.quick, **where)}")
        return 0
    try:
        with watched(options.name, quiet=options.quiet) as progress:
            outcome = run(
                options.name,
                options.out,
                options.quick,
                scale=options.scale,
                workers=workers_of(options),
                progress=progress,
                tables=options.table,
            )
    except RuntimeError as error:
        print(f"{_PROGRAM} study: failed: {error}", file=sys.stderr)
        return 1
    print("\n".join(["", outcome.answer, "", *map(str, outcome.paths)]))
    return 0


# ------------------------------------------------------------------------------------------------------- for sweeps


def _sweep_worker(words: list[str]) -> int:
    from twophase.sweep.worker import serve

    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} sweep-worker", description=_COMMANDS["sweep-worker"][1], allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the sweep's folder")
    parser.add_argument(
        "--in-memory",
        type=int,
        default=8,
        metavar="N",
        help="states at branches held in memory at most, each about the size of a checkpoint; others are read back "
        "from disk (%(default)s)",
    )
    parser.add_argument("--leash", action="store_true", help="end when stdin does")
    options = parser.parse_args(words)
    if options.in_memory < 0:
        raise UsageError(f"--in-memory is {options.in_memory}; it must be a whole number >= 0")
    return serve(options.out, in_memory=options.in_memory, leash=options.leash)
