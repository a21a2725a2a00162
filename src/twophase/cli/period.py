"""`twophase period`: when to restart a rule on a spectrum."""

from __future__ import annotations

from pathlib import Path

from twophase.cli.commands import plain_parser


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    from twophase.advice.period import Question, answer, describe, to_json
    from twophase.base.config import with_values
    from twophase.base.options import add_values, values_given
    from twophase.figures.period import check_files, draw

    parser = plain_parser("period")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the oscillation, and rate and loss against the period, into FILE (.png or .pdf; numbers as .csv)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    add_values(parser, Question(), "the question")
    options = parser.parse_args(arguments)
    if options.plot:
        check_files(options.plot)
    advice = answer(with_values(Question(), values_given(options, Question())))
    print(to_json(advice) if options.json else describe(advice), flush=True)
    if options.plot:
        paths = draw(advice, options.plot)
        if not options.json:
            print("figure " + ", numbers ".join(map(str, paths)))
    return 0
