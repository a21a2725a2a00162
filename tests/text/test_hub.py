"""C4 from the hub, played by a small server on this machine: the same code and the same shards as from local files."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from twophase.text.meta import TRAIN, VALIDATION, read_meta
from twophase.text.prepare import Request, prepare

pytest.importorskip("huggingface_hub", reason="the extra 'data' is not installed")

TRAIN_0, TRAIN_1 = "c4-train.00000-of-01024.json.gz", "c4-train.00001-of-01024.json.gz"
HELD = "c4-validation.00000-of-00008.json.gz"


def packed(name: str, documents: int) -> bytes:
    lines = [json.dumps({"text": f"{name} document {i} " * 5, "url": "http://x"}) for i in range(documents)]
    return gzip.compress("".join(line + "\n" for line in lines).encode())


FILES = {name: packed(name, 400) for name in (TRAIN_0, TRAIN_1, HELD)}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as streaming a data set asks for."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's names
        """Say nothing."""

    def reply(self, data: bytes, status: int = 200, **headers: str) -> None:
        """Answer with some bytes."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data)), "ETag": '"x"'} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        """Facts of the data set, its list of files, or a range of one."""
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path in ("/api/datasets/allenai/c4", "/api/datasets/allenai/c4/revision/main"):
            about: dict[str, Any] = {"id": "allenai/c4", "_id": "x", "sha": "1" * 40, "private": False, "siblings": []}
            self.reply(json.dumps(about).encode())
        elif path == "/api/datasets/allenai/c4/tree/main/en":
            entries = [
                {"type": "file", "path": f"en/{n}", "size": len(data), "oid": n[:9]} for n, data in FILES.items()
            ]
            self.reply(json.dumps(entries).encode())
        elif path.startswith("/datasets/allenai/c4/resolve/") and name in FILES:
            data = FILES[name]
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if asked is None:
                self.reply(data)
                return
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            span = f"bytes {first}-{last}/{len(data)}"
            self.reply(data[first : last + 1], 206, Content_Range=span)
        else:
            self.reply(b"{}", 404)

    do_HEAD = do_GET  # noqa: N815 - the library's name for a method


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_c4_from_the_hub_is_c4_from_files(hub: str, tmp_path: Path):
    """The shards of `c4` are those of its files here: its validation split first, training files in order."""
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    limits: dict[str, Any] = {"tokens": 120_000, "validation_tokens": 10_000, "shard_tokens": 20_000}
    local = prepare(
        Request(tuple(str(tmp_path / name) for name in FILES), tmp_path / "local", tokenizer="bytes", **limits)
    )
    assert local.splits[TRAIN][0].documents < 400 < sum(shard.documents for shard in local.splits[TRAIN])
    code = f"""
import sys
from pathlib import Path
from twophase.text.prepare import Request, prepare
prepare(Request(("c4",), Path(sys.argv[1]), tokenizer="bytes", **{limits!r}))
"""
    out = tmp_path / "remote"
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    remote = read_meta(out)
    assert remote.fingerprint == local.fingerprint
    assert remote.tokens(VALIDATION) >= 10_000
    assert len(remote.source["files"]) == 1024
