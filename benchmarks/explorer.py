"""The explorer's page in headless Chromium: its size, when the first curve stands, and the frames while dragging.

A frame is what passes between two pictures that the browser asks for; at 60 a second it is 16.7 ms. Work is the part of
it in which the page computes and draws. Needs playwright and a Chromium (`make setup-dev`).
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bounds import finish
from twophase.explorer.page import State, build

LOADS = 9
MOVES = 180

WATCH = """() => {
    const seen = window.seen = { frames: [], work: [] }, render = app.render;
    let last = null;
    const tick = now => { if (last !== null) seen.frames.push(now - last); last = now; requestAnimationFrame(tick); };
    requestAnimationFrame(tick);
    app.render = () => { const t = performance.now(); render(); seen.work.push(performance.now() - t); };
}"""


def quantiles(values: list[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=20)[-1]


def drag(page: Any, target: str, way: tuple[float, float]) -> dict[str, list[float]]:
    """Drag an element by a share of its width, there and back, and return what the page has seen."""
    page.locator(target).scroll_into_view_if_needed()
    page.wait_for_timeout(1000)  # the map's cells are there
    box = page.locator(target).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + way[0] * box["width"], y)
    page.mouse.down()
    page.evaluate("() => { seen.frames.length = seen.work.length = 0; }")
    for move in range(MOVES):
        share = way[0] + (way[1] - way[0]) * (1 - abs(2 * move / MOVES - 1))
        page.mouse.move(box["x"] + share * box["width"], y)
        page.wait_for_timeout(4)  # a hand moves on between two frames
    seen = page.evaluate("() => ({ frames: [...seen.frames], work: [...seen.work] })")
    page.mouse.up()
    return seen


def main() -> int:
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - an extra
    except ImportError:
        print("skipped: no playwright (make setup-dev installs it)")
        return finish("explorer", {})
    path = os.environ.get("TWOPHASE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        print("skipped: no chromium (apt-get install chromium, or set TWOPHASE_CHROMIUM)")
        return finish("explorer", {})
    state = State(1.0, 0.9, False, "ema", 7, 120)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder) / "explore.html"
        file.write_text(build(state), encoding="utf-8")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        figures: dict[str, float] = {"page_bytes": file.stat().st_size}
        starts = []
        for _ in range(LOADS):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(file.as_uri())
            starts.append(page.evaluate("performance.getEntriesByName('first-curve')[0].startTime"))
            page.close()
        figures["first_curve_ms"] = statistics.median(starts)
        print(f"page {figures['page_bytes'] / 1000:.1f} kB; first curve after {figures['first_curve_ms']:.0f} ms")
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(file.as_uri())
        page.evaluate(WATCH)
        targets = {"lr": "#slider-lr", "restart": "#slider-restart", "map": "#map .plot >> nth=1"}
        print(f"{'dragging':10} {'frame ms: median':>18} {'95 %':>7} {'work ms: median':>17} {'95 %':>7}")
        for name, target in targets.items():
            seen = drag(page, target, (0.4, 0.7))
            frame, frame_95 = quantiles(seen["frames"])
            work, work_95 = quantiles(seen["work"])
            print(f"{name:10} {frame:18.1f} {frame_95:7.1f} {work:17.1f} {work_95:7.1f}")
            figures |= {f"{name}_frame_ms": frame, f"{name}_frame_ms_95": frame_95}
            figures |= {f"{name}_work_ms": work, f"{name}_work_ms_95": work_95}
        browser.close()
    return finish("explorer", {name: round(value, 2) for name, value in figures.items()})


if __name__ == "__main__":
    sys.exit(main())
