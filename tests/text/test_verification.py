"""Files that were taken on trust are read back while a run trains: what is wrong with one is known before its end."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest

import shardmaker
from twophase.text import verification as module
from twophase.text.shards import VERIFIED, open_shards
from twophase.text.verification import Verification


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training shards and one for validation, opened before."""
    ids = [np.arange(size, dtype=np.uint16) % 500 for size in (3000, 2000, 400)]
    path = shardmaker.prepared(tmp_path / "toy", ids[:2], ids[2:], 500)
    assert open_shards(path).trusted == {}
    return path


def verified(folder: Path) -> Verification:
    verification = Verification(open_shards(folder).trusted)
    verification.start()
    verification.finish()
    return verification


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00001.bin", "validation-00000.bin"])
def test_damage_behind_an_old_time_is_seen(folder: Path, name: str) -> None:
    """A file whose size and time of change are as before is named with its remedy, and is not trusted any more."""
    assert set(open_shards(folder).trusted) == set(folder.glob("*.bin"))
    assert verified(folder).fault == ""
    shardmaker.flip(folder / name)
    fault = verified(folder).fault
    assert fault.startswith(f"{folder / name} was damaged since it was prepared")
    assert "copy it again, or prepare the folder again" in fault
    assert json.loads((folder / VERIFIED).read_text())[name] is None
    with pytest.raises(ValueError, match="its SHA-256 is"):
        open_shards(folder)


def test_files_that_are_gone_are_a_fault(folder: Path) -> None:
    """A file that cannot be read back is named."""
    verification = Verification(open_shards(folder).trusted)
    (folder / "train-00001.bin").unlink()
    verification.start()
    assert "train-00001.bin cannot be read any more" in verification.finish()


def test_the_rate_is_bounded_until_a_run_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background at most so many bytes a second are read; when the run has ended, the rest without a pause."""
    monkeypatch.setattr(module, "BYTES_PER_SECOND", 10_000_000)
    path, data = tmp_path / "x", bytes(40_000_000)
    path.write_bytes(data)
    verification = Verification({path: hashlib.sha256(data).hexdigest()})
    begin = time.monotonic()
    verification.start()
    verification.start()
    time.sleep(0.3)
    assert verification._done_bytes <= 10_000_000 * (time.monotonic() - begin) + (1 << 20)
    assert verification.finish() == ""
    assert verification._done_bytes == len(data)
    assert time.monotonic() - begin < 4.0  # at the bounded rate
