"""`twophase export`: a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from twophase.cli.commands import plain_parser


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = plain_parser("export")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, or of a sweep's cell")
    parser.add_argument("out", type=Path, metavar="DIR", help="folder to write; missing or empty")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (%(default)s)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="the run's token shards, if they are no longer where it read them"
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="write the model only")
    options = parser.parse_args(arguments)
    from twophase.tasks.lm.export import describe, export

    tokenizer = not options.no_tokenizer
    try:
        record = export(options.run, options.out, dtype=options.dtype, data=options.data, tokenizer=tokenizer)
    except OSError as error:
        path = Path(error.filename or options.out).resolve()
        if any(source and path.is_relative_to(source.resolve()) for source in (options.run, options.data)):
            raise OSError(f"{error.filename} cannot be read ({error.strerror or error})") from error
        raise OSError(
            f"{options.out} cannot be written ({error.strerror or error}); free space or choose another DIR"
        ) from error
    print(describe(options.out, record))
    return 0
