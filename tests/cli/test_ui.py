"""`twophase ui` lists the runs and sweeps below a folder to this machine alone, and reads nothing else."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

from browser import Watched, axe_violations
from commands import snapshot
from runmaker import EMA, NESTEROV, SUM, config_of, write_lines, write_run
from twophase.cli.main import main
from twophase.cli.serving import serve
from twophase.report.ui import Library
from twophase.sweeps.grid import Axis, Sweep, product
from twophase.sweeps.table import Row, write_rows

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with three runs, one of them damaged, a sweep with a run, a file, and a link that leads out."""
    outside = write_run(tmp_path / "outside", SUM, [0.3], 9)
    root = tmp_path / "runs"
    write_run(root / "a b", SUM, [0.3], 9)
    write_run(root / "deep" / "<i>", EMA, [0.3], 9, finished=False)
    write_run(root / "damaged", SUM, [0.3], 9)
    (root / "damaged" / "summary.json").write_text("{")
    base = config_of(NESTEROV, rounds=9)
    sweep = Sweep("sweep", base, product(base, [Axis("outer.lr", (0.3, 0.7))]))
    write_run(root / "sweep" / "runs" / sweep.cells[0].run_id, NESTEROV, [0.3], 9, config=sweep.cells[0].config)
    states = zip(sweep.cells, ("missing", "missing"), strict=True)
    write_rows(root / "sweep" / "cells.csv", [Row(c.arm, c.run_id, sweep.values(c), state) for c, state in states])
    (root / "sweep" / "runs" / "first").symlink_to(sweep.cells[0].run_id)
    (root / "notes.txt").write_text("secret")
    (root / "link").symlink_to(outside)
    return root


@pytest.fixture
def server(root: Path) -> Iterator[ThreadingHTTPServer]:
    """A server of that folder on a free port."""
    server = serve(Library(root), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: ThreadingHTTPServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Return status and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["Location"] or text


ANSWERS: dict[str, tuple[int, str]] = {
    "/": (200, "4 folders below"),
    "/view/a%20b/": (200, "In short"),
    "/view/a%20b": (301, "/view/a%20b/"),
    "/view/deep/%3Ci%3E/": (200, "The run is in progress"),
    "/view/sweep/": (200, "A sweep of 2 settings"),
    "/view/sweep/report.html": (200, "A sweep of 2 settings"),
    "/view/sweep/runs/first/": (200, "the sweep that it belongs to"),
    "/view/?run=a+b&run=deep/%3Ci%3E": (200, "Settings that differ"),
    "/view/?run=a+b": (404, "1 run chosen; choose two to 8"),
    "/view/?run=a+b&run=a+b": (404, "choose two to 8"),
    "/view/?run=a+b&run=../outside": (404, "is no folder below"),
    "/view/?run=a+b&run=sweep": (404, "is not the folder of a run"),
    "/view/damaged/": (404, "is damaged"),
    "/view/": (404, "is not the folder of a run"),
    "/view/deep/": (404, "is not the folder of a run"),
    "/view/none/": (404, "is no folder below"),
    "/view/notes.txt": (404, "is no folder below"),
    "/view/../outside/": (404, "is no folder below"),
    "/view/%2e%2e/outside/": (404, "is no folder below"),
    "/view/..%2foutside/": (404, "is no folder below"),
    "/view//etc/": (404, "is no folder below"),
    "/view/a%20b%00/": (404, "is no folder below"),
    "/view/link/": (404, "is no folder below"),
    "/etc/passwd": (404, "there is no such page"),
}
"""Status and words of the answer to each address."""


@pytest.mark.slow
def test_answers(root: Path, server: ThreadingHTTPServer) -> None:
    """Runs and sweeps have pages, and their links lead on; all else has a message; nothing on the disk changes."""
    before = snapshot(root.parent)
    for path, (status, words) in ANSWERS.items():
        answer = ask(server, path)
        assert answer[0] == status, path
        assert words in answer[1].replace("&lt;", "<"), path
        assert "secret" not in answer[1]
    assert snapshot(root.parent) == before


def test_answers_to_this_machine_alone(server: ThreadingHTTPServer) -> None:
    """It listens on 127.0.0.1; another host's name (DNS rebinding) is refused, and so is every method that writes."""
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", ""):
        status, text = ask(server, "/view/a%20b/", Host=host)
        assert (status, "In short" in text) == (403, False)
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method)[0] == 501


def test_a_connection_that_is_closed_prints_nothing(server: ThreadingHTTPServer, capsys: Any) -> None:
    """A browser that loads anew drops its connection; the terminal then shows no traceback, and the server goes on."""
    dropped = socket.create_connection(("127.0.0.1", server.server_port))
    dropped.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, at once
    dropped.sendall(b"GET")
    dropped.close()
    assert ask(server, "/view/a%20b/")[0] == 200
    threads = [thread for thread in threading.enumerate() if "process_request" in thread.name]
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), ZeroDivisionError("ours")])
def test_a_page_that_cannot_be_made(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception
) -> None:
    """A file that goes while it is read is a message on the page; a fault of the program, a traceback here."""

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Library, "folder_page", refuse)
    if isinstance(error, OSError):
        status, text = ask(server, "/view/a%20b/")
        assert (status, "cannot be read: Permission denied" in text) == (404, True)
        return
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server, "/view/a%20b/")
    for thread in [thread for thread in threading.enumerate() if "process_request" in thread.name]:
        thread.join()
    assert "ZeroDivisionError: ours" in capsys.readouterr().err


def test_the_list(server: ThreadingHTTPServer) -> None:
    """It has a row for each run and sweep with its state and result; the runs of a sweep are on the sweep's page."""
    text = ask(server, "/")[1]
    rows = dict(re.findall(r'<tr><th scope="row"[^>]*><a href="([^"]*)">.*?</th>(.*?)</tr>', text))
    assert set(rows) == {"/view/a%20b", "/view/deep/%3Ci%3E", "/view/damaged", "/view/sweep"}
    for path, words in {
        "/view/a%20b": ["finished", "validation loss 2.079 nats a token, perplexity 8", "heavy ball lr 0.7"],
        "/view/deep/%3Ci%3E": ["unfinished", "last train loss 2.67", "never"],
        "/view/damaged": ["damaged"],
        "/view/sweep": ["sweep", "unfinished", "0 of 2 settings finished"],
    }.items():
        assert all(f">{word}" in rows[path] for word in words), path


def test_the_list_has_the_results_of_the_pages(root: Path, server: ThreadingHTTPServer) -> None:
    """An unfinished run has the last loss that it has measured, whatever its last lines hold."""
    lines: list[dict[str, Any]] = [{"step": 1, "train_loss": 3.0}, {"step": 1, "validation_loss": 2.5}]
    lines += [{"step": 2, "train_loss": 2.25}, {"step": 2, "round": 1, "inner_lr": 0.1}]
    write_lines(root / "deep" / "<i>" / "metrics.jsonl", lines)
    for path in ("/", "/view/deep/%3Ci%3E/"):
        assert "last validation loss 2.5" in ask(server, path)[1], path


def test_of_many_folders_the_newest_are_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is kept wherever the folders lie, and the page says that there are more."""
    monkeypatch.setattr("twophase.report.ui._MOST_ENTRIES", 2)
    for number, name in enumerate(("sweep", "a b", "deep/<i>", "damaged")):
        for entry in (root / name).iterdir():
            os.utime(entry, (number, number), follow_symlinks=False)
    text = Library(root).list_page()
    assert "The newest 2 of 4 folders below" in text
    assert set(re.findall(r'<a href="/view/([^"]*)">', text)) == {"deep/%3Ci%3E", "damaged"}
    monkeypatch.setattr("twophase.report.ui._DEEPEST", 1)
    assert "The newest 2 of 3 folders below" in Library(root).list_page()


def test_an_odd_folder_is_one_row(root: Path, server: ThreadingHTTPServer) -> None:
    """A name that is not UTF-8, a configuration of odd types, and a user's own configuration leave the list whole."""
    odd = root / os.fsdecode(b"caf\xe9")
    shutil.copytree(root / "a b", odd)
    (odd / "config.yaml").write_text("sync: {restart: 3}\n", encoding="utf-8")
    (root / "config.yaml").write_text("outer: {lr: 0.7}\n", encoding="utf-8")
    (root / "begun").mkdir()
    (root / "begun" / "sweep.json").write_text("{}", encoding="utf-8")
    library = Library(root)
    text = library.list_page()
    assert "no table yet" in text
    for part in ("/view/a%20b", "/view/sweep", "/view/caf%E9"):
        assert f'href="{part}"' in text
    assert library.folder_page([os.fsdecode(b"caf\xe9")])
    assert 'value="caf%E9"' in text  # the browser's form sends what stands there, quoted once more
    status, text = ask(server, "/view/?run=caf%25E9&run=a%2520b")
    assert (status, "caf" in text) == (200, True)


def test_a_page_is_made_again_when_a_file_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same page is not made twice, while it is one of the newest.

    A line more in a log makes it new, in a sweep's run too.
    """
    made: list[Path] = []
    monkeypatch.setattr(Library, "_page", lambda _, folder: made.append(folder) or str(len(made)))
    library = Library(root)
    for folder, log in ((["a b"], "a b"), (["sweep"], "sweep/runs/first")):
        first = [library.folder_page(folder) for _ in range(2)]
        write_lines(root / log / "rounds.jsonl", [])
        assert first == [str(len(made))] * 2
        assert library.folder_page(folder) == str(len(made)) != first[0]
    assert len(made) == 4
    monkeypatch.setattr("twophase.report.ui._MOST_PAGES", 1)
    for name in ("sweep", "a b", "sweep"):
        library.folder_page([name])
    assert [folder.name for folder in made[4:]] == ["a b", "sweep"]


def test_the_command_serves_until_it_is_interrupted(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the address, opens it if asked to, and ends with status 0 and a free port on Ctrl-C."""
    opened: list[str] = []
    answers: list[str] = []

    def serve_until_interrupted(server: ThreadingHTTPServer) -> None:
        server.handle_request()
        raise KeyboardInterrupt

    def ask_for_the_list(address: str) -> None:
        opened.append(address)
        browser.start()

    browser = threading.Thread(target=lambda: answers.append(urlopen(opened[0], timeout=30).read().decode()))  # noqa: S310
    monkeypatch.setattr("socketserver.BaseServer.serve_forever", serve_until_interrupted)
    monkeypatch.setattr("webbrowser.open", ask_for_the_list)
    assert main(["ui", str(root), "--port", "0", "--open"]) == 0
    address = re.findall(r"http://127\.0\.0\.1:\d+/", capsys.readouterr().out)
    browser.join(30)
    assert address == opened
    assert "4 folders below" in answers[0]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(address[0].split(":")[-1][:-1])), timeout=5)


def test_a_port_in_use(server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with status 2 and one message."""
    assert main(["ui", ".", "--port", str(server.server_port)]) == 2
    assert "in use" in capsys.readouterr().err


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_in_a_browser(browser: Browser, root: Path, server: ThreadingHTTPServer, width: int, scheme: Any) -> None:
    """The list filters, shows a run that has come, keeps what is chosen, and lays it over each other; no WCAG fault."""
    base = f"http://127.0.0.1:{server.server_port}/"
    view: Any = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    watched = Watched(browser.new_page(**view, bypass_csp=True))
    page = watched.page
    page.clock.install()
    page.goto(base)
    assert page.get_by_role("status").text_content() == "4 of 4 shown"
    assert axe_violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_label("choose a b").check()
    page.get_by_label("choose deep/<i>").check()
    page.get_by_label("Filter").fill("sweep")
    assert page.get_by_role("status").text_content() == "3 of 4 shown"  # with the two that are chosen
    page.get_by_label("Filter").fill("")
    page.get_by_label("State").select_option("damaged")
    assert page.get_by_role("status").text_content() == "3 of 4 shown"
    page.get_by_label("State").select_option("")
    write_run(root / "new", NESTEROV, [0.3], 9)
    page.clock.run_for(6_000)
    page.get_by_role("link", name="new").wait_for()
    assert (page.locator("caption").text_content() or "").startswith("5 folders below")
    assert page.get_by_label("choose a b").is_checked()
    page.get_by_role("button", name="Lay the chosen runs").click()
    page.wait_for_selector("canvas")
    assert page.locator(".legend").first.get_by_role("button").count() == 2
    page.goto(base)
    page.get_by_role("link", name="sweep").click()
    page.get_by_role("link", name="run", exact=True).first.click()
    page.get_by_role("link", name="the sweep that it belongs to").click()
    assert page.url == f"{base}view/sweep/"
    assert axe_violations(page) == []
    assert [trouble for trouble in watched.troubles if not trouble.startswith(base)] == []
    page.close()
