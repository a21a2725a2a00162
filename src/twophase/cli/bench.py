"""`twophase bench`: an outer optimizer through the protocol, against the stored reference arms."""

from __future__ import annotations

from pathlib import Path

from twophase.cli.commands import run_parser


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import add_workers
    from twophase.recipes.bench import PLACES, SIZES

    parser = run_parser("bench")
    parser.add_argument(
        "arm",
        nargs="?",
        metavar="ARM",
        help="METHOD[@RESTART][+SLOT=TEXT] as for twophase tune, or MODULE:CLASS of a policy or method of your own",
    )
    parser.add_argument("--reference", action="store_true", help="run the protocol's own arms, in the place of ARM")
    parser.add_argument("--regimes", action="store_true", help="run what the map of regimes rests on, and stop")
    parser.add_argument("--size", choices=list(SIZES), default="quick", help="what is spent on it (default: quick)")
    parser.add_argument(
        "--places", nargs="+", choices=[place.name for place in PLACES], metavar="PLACE", help="only these"
    )
    add_workers(parser)
    options = parser.parse_args(words)
    if (options.arm is not None) + options.reference + options.regimes != 1:
        parser.error("give an ARM, --reference for the protocol's own, or --regimes")

    from twophase.cli.benching import run_bench
    from twophase.cli.regimes import run_regimes
    from twophase.studies.policies import share_with_workers

    share_with_workers()  # parts of auto, as its controls
    size = SIZES[options.size]
    if options.regimes:
        out = options.out or Path("runs") / "regimes"
        rows = run_regimes(out, workers=options.workers, quiet=options.quiet)
        print(f"{len(rows)} runs: {out / 'regimes.csv'}")
        return 0
    chosen = options.places or size.places
    out = options.out or Path("runs") / "bench"
    run_bench(
        size,
        out,
        [options.arm] if options.arm else [],
        places=[place for place in PLACES if place.name in chosen],
        workers=options.workers,
        quiet=options.quiet,
    )
    return 0
