"""`twophase bench`: an outer optimizer through the protocol, against the stored reference arms."""

from __future__ import annotations

import os
from pathlib import Path

from twophase.cli.commands import run_parser


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.cli.sweeping import add_workers
    from twophase.recipes.bench import PLACES, SIZES

    parser = run_parser("bench")
    parser.add_argument(
        "arm",
        nargs="?",
        metavar="ARM",
        help="METHOD[@RESTART][+SLOT=TEXT] as for twophase tune, or MODULE:CLASS or FILE.py:CLASS of a policy or a "
        "method of your own",
    )
    parser.add_argument(
        "--reference", action="store_true", help="run the protocol's own arms; with --arms and --places some of them"
    )
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="with --reference: only these, and averaging")
    parser.add_argument("--regimes", action="store_true", help="run what the map of regimes rests on, and stop")
    parser.add_argument("--size", choices=list(SIZES), help="what is spent (default: quick; of --reference full)")
    parser.add_argument(
        "--places", nargs="+", choices=[place.name for place in PLACES], metavar="PLACE", help="only these"
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="DIR",
        help="with --reference: run nothing, write what has ended into the table in DIR",
    )
    add_workers(parser)
    options = parser.parse_args(arguments)
    if (options.arm is not None) + options.reference + options.regimes != 1:
        parser.error("give an ARM, --reference for the protocol's own, or --regimes")
    if (options.into or options.arms) and not options.reference:
        parser.error("--into and --arms are for --reference")
    if options.workers == 0 and not options.regimes:  # before there is a folder
        parser.error("--workers is 0; a comparison waits for its runs: give 1 or more")

    from twophase.cli.benching import bench_arm, run_bench, write_reference
    from twophase.cli.own_arm import read_arm
    from twophase.cli.regimes import run_regimes
    from twophase.studies.policies import share_with_workers

    share_with_workers()  # parts of auto, as its controls
    how = {"workers": options.workers, "quiet": options.quiet}
    folder = "regimes" if options.regimes else "bench" if options.reference else "card"
    out = options.out or Path("runs") / folder
    size = options.size or ("full" if options.reference else "quick")
    places = [place for place in PLACES if place.name in (options.places or SIZES[size].places)]
    if strange := [arm for arm in options.arms or () if not all(arm in place.arms for place in places)]:
        parser.error(
            f"--arms {strange[0]}: not one of the protocol's at each of these places, which docs/bench.md lists"
        )
    if options.regimes:
        print(f"{len(run_regimes(out, places=places, **how))} runs: {out / 'regimes.csv'}")
    elif options.into:
        write_reference(out, options.into)
        print(f"{options.into / 'reference.csv'}")
    elif options.reference:
        _, refused = run_bench(SIZES[size], out, options.arms or (), places=places, **how)
        print("".join(f"{place}: not run here. {why}\n" for place, why in refused.items()) + f"{out / 'results.csv'}")
    else:
        arm, code = read_arm(options.arm, os.environ)
        card = bench_arm(arm, size, out, code=code, places=places, **how)
        print(card.line())
        for name, why in card.refused.items():
            print(f"{name}: not run here. {why}")
        for note in dict.fromkeys(place.note for place in card.places if place.note):
            print(note)
        print(f"card {out / 'card.html'}")
    return 0
