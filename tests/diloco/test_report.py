"""Reports: numbers for a log, a line for people, and one of several fragments."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from diloco.scenarios import start
from twophase.diloco.report import RoundReport, merged


def reports() -> list[RoundReport]:
    """Those of three fragments' second round, of which the first restarted."""
    return start("three").go(range(12))[3:]


def test_a_report_is_a_line_and_a_dictionary_for_json() -> None:
    """The dictionary has every number but signals; the line has no break."""
    report, *_ = reports()
    values = json.loads(json.dumps(report.as_dict()))
    assert values.keys() == set(RoundReport.__slots__) - {"signals"} | {"buffer_norm", "cosine", "gain"}
    for name in ("gain", "cosine", "buffer_norm", "pseudo_gradient_norm", "restarted", "checksum", "round", "seconds"):
        assert values[name] == getattr(report, name)
    assert len(report.checksum) == 16
    text = str(report)
    for part in ("round 2", "6 inner steps", "2 replicas", "restarted", f"gain {report.gain:.3g}", "0 bytes"):
        assert part in text
    assert "\n" not in text
    (other, *_) = start("torch", replicas=[0]).go(range(4))
    assert "1 replica," in str(other)
    assert "gain" not in str(other)
    assert "restarted" not in str(other)


def test_several_reports_are_one() -> None:
    """Counts are the most, flags any, norms over all; the checksum depends on each and on their order."""
    first, second, third = reports()
    one = merged([first, second, third])
    assert merged([second]) is second
    assert (one.round, one.complete, one.inner_steps, one.restarted) == (2, True, 6, True)
    assert [fragment.name for fragment in one.fragments] == ["0", "1", "2"]
    assert "0: restarted" in str(one)
    assert one.pseudo_gradient_norm == pytest.approx(math.hypot(*(r.pseudo_gradient_norm for r in reports())))
    assert one.buffer_norm == pytest.approx(math.hypot(*(r.buffer_norm for r in reports())))
    weights = [r.pseudo_gradient_norm**2 for r in reports()]
    gains = [r.gain * weight for r, weight in zip(reports(), weights, strict=True)]
    assert one.gain == pytest.approx(sum(gains) / sum(weights))
    inner = sum(r.cosine * r.pseudo_gradient_norm * r.buffer_norm for r in reports())
    assert one.cosine == pytest.approx(inner / one.pseudo_gradient_norm / one.buffer_norm)
    assert one.seconds["outer"] == sum(r.seconds["outer"] for r in (first, second, third))
    assert one.signals == third.signals
    assert merged([replace(first, bytes_sent=3), replace(second, bytes_sent=4, partial=True)]).bytes_sent == 7
    assert merged([first, replace(second, partial=True)]).partial
    orders = ([first, second, third], [second, first, third], [first, second], [first, replace(second, checksum="0f")])
    assert len({merged(order).checksum for order in orders}) == 4
