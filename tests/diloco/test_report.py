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
    """The dictionary has every number, the loss among them; the line has no break."""
    report, *_ = reports()
    values = json.loads(json.dumps(report.as_dict()))
    assert values.keys() == set(RoundReport.__slots__) | {"buffer_norm", "cosine", "gain"}
    for name in ("gain", "cosine", "buffer_norm", "pseudo_gradient_norm", "restarted", "checksum", "round", "seconds"):
        assert values[name] == getattr(report, name)
    assert "\n" not in str(report)


def test_several_reports_are_one() -> None:
    """Counts are the most, flags any, norms over all; the checksum depends on each and on their order."""
    first, second, third = of_all = reports()
    one = merged([first, second, third])
    assert merged([second]) is second
    assert (one.round, one.complete, one.inner_steps, one.restarted) == (2, True, 6, True)
    assert [fragment.name for fragment in one.fragments] == ["0", "1", "2"]
    norms, buffers = ([getattr(r, name) for r in of_all] for name in ("pseudo_gradient_norm", "buffer_norm"))
    assert (one.pseudo_gradient_norm, one.buffer_norm) == pytest.approx((math.hypot(*norms), math.hypot(*buffers)))
    weights = [g**2 for g in norms]
    assert one.gain == pytest.approx(sum(r.gain * w for r, w in zip(of_all, weights, strict=True)) / sum(weights))
    inner = sum(r.cosine * r.pseudo_gradient_norm * r.buffer_norm for r in of_all)
    assert one.cosine == pytest.approx(inner / one.pseudo_gradient_norm / one.buffer_norm)
    assert one.seconds["outer"] == sum(r.seconds["outer"] for r in of_all)
    assert one.signals == third.signals
    two = merged([replace(first, bytes_sent=3), replace(second, bytes_sent=4, partial=True)])
    assert (two.bytes_sent, two.partial) == (7, True)
    orders = ([first, second, third], [second, first, third], [first, second], [first, replace(second, checksum="0f")])
    assert len({merged(order).checksum for order in orders}) == 4
