"""`twophase ui`: serves a live list of runs and sweeps, and their pages, to this machine's own browser alone."""

from __future__ import annotations

from pathlib import Path

from twophase.base.config import UsageError
from twophase.cli.commands import between, config_paths, plain_parser

_PORT = 8642


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = plain_parser("ui")
    parser.add_argument("folder", type=Path, metavar="DIR", nargs="?", default=Path("runs"), help="folder (runs)")
    parser.add_argument(
        "--port",
        type=between(0, 65535),
        default=_PORT,
        metavar="N",
        help=f"port of this machine alone; 0: a free one ({_PORT})",
    )
    parser.add_argument("--open", action="store_true", help="open the list in the browser")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        raise UsageError(f"{options.folder}: is no folder; give the one that holds the runs and sweeps")
    from twophase.cli.serving import HOST, serve  # what reads and draws is slow to import
    from twophase.report.ui import Library

    server = serve(Library(options.folder, config_paths()), options.port)
    address = f"http://{HOST}:{server.server_port}/"
    print(f"runs and sweeps below {options.folder}: {address} (this machine alone; Ctrl-C ends it)", flush=True)
    if options.open:
        import webbrowser

        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0
