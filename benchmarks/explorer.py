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
from importlib.util import find_spec
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


def measure(browser: Any, file: Path) -> dict[str, float]:
    """Return the time to the first curve, and median and 95th percentile of frames and work of each drag, in ms."""
    starts = []
    for _ in range(LOADS):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(file.as_uri())
        starts.append(page.evaluate("performance.getEntriesByName('first-curve')[0].startTime"))
        page.close()
    figures = {"page_bytes": file.stat().st_size, "first_curve_ms": statistics.median(starts)}
    print(f"page {figures['page_bytes'] / 1000:.1f} kB; first curve after {figures['first_curve_ms']:.0f} ms")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    page.evaluate(WATCH)
    print(f"{'dragging':10} {'frame ms: median':>18} {'95 %':>7} {'work ms: median':>17} {'95 %':>7}")
    for name, target in {"lr": "#slider-lr", "restart": "#slider-restart", "map": "#map-restart .u-over"}.items():
        for kind, values in drag(page, target, (0.4, 0.7)).items():
            figures[f"{name}_{kind.removesuffix('s')}_ms"] = statistics.median(values)
            figures[f"{name}_{kind.removesuffix('s')}_ms_95"] = statistics.quantiles(values, n=20)[-1]
        of = [figures[f"{name}_{part}"] for part in ("frame_ms", "frame_ms_95", "work_ms", "work_ms_95")]
        print("{:10} {:18.1f} {:7.1f} {:17.1f} {:7.1f}".format(name, *of))
    return figures


def main() -> int:
    path = os.environ.get("TWOPHASE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None or find_spec("playwright") is None:
        print("skipped: no playwright (make setup-dev installs it), or no chromium (set TWOPHASE_CHROMIUM)")
        return finish("explorer", {})
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - an extra

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        file = Path(folder) / "explore.html"
        file.write_text(build(State(1.0, 0.9, False, "ema", 7, 120)), encoding="utf-8")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        figures = measure(browser, file)
        browser.close()
    return finish("explorer", {name: round(value, 2) for name, value in figures.items()})


if __name__ == "__main__":
    sys.exit(main())
