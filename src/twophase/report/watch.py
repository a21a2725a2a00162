"""What a report has while its run goes on: when it was written, a link to the newest, and loading by itself.

A page that loads itself again takes a reader's place from them. So it can be stopped, by the first control on the page,
and it gives back what was there: the place on the page, what was opened, scrolled and focused, and whether it was
stopped. It waits while some text is selected, or the page is not seen. The script is the same for every page, and the
page's policy lets nothing else run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from twophase.report.page import Html, notes, tag


def notice(what: str, refresh: float | None, problems: Sequence[object]) -> Html | None:
    """Return the notice at the top of a page; None where there is nothing to say.

    Args:
        what: "run" or "sweep".
        refresh: seconds after which the page is written again; None without a watch.
        problems: sentences about what is missing or wrong in the folder.
    """
    if not problems and refresh is None:
        return None
    return tag("div", *(_going(what, refresh) if refresh else ()), notes(problems), class_="notice", role="note")


def _going(what: str, refresh: float) -> tuple[Html, Html]:
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    box = tag("input", type="checkbox", id="again", checked=True, autocomplete="off", data_seconds=f"{refresh:g}")
    return (
        tag(
            "p",
            f"The {what} is going on. This page was written at {now}, and is written again every {refresh:g} s. ",
            tag("a", "Show the newest", href=""),
        ),
        # Without script there is nothing to stop.
        tag("p", tag("label", box, f" Show the newest by itself every {refresh:g} s"), hidden=True),
    )


SCRIPT = """
const box = document.getElementById("again"), store = "twophase report " + location.pathname
const parts = () => {
  const found = new Map(), count = Object.create(null)
  for (const e of document.querySelectorAll("a, summary, input, [tabindex]")) {
    const to = e.getAttribute("href"), words = e.getAttribute("aria-label") ?? e.textContent.replace(/\\d+/g, "")
    const name = to && !to.startsWith("data:") ? to : words
    count[name] = (count[name] ?? 0) + 1
    found.set(name + " " + count[name], e)
  }
  return found
}
const top_of = e => e.getBoundingClientRect().top
const keep = () => {
  const above = [...document.querySelectorAll("h2")].filter(e => top_of(e) <= 0).pop()
  const kept = {on: box.checked, y: scrollY, id: above?.id, top: above && top_of(above), open: [], wide: []}
  for (const [name, e] of parts()) {
    if (e.matches("details[open] > summary")) kept.open.push(name)
    if (e.scrollLeft) kept.wide.push([name, e.scrollLeft])
    if (e === document.activeElement) kept.focus = name
  }
  history.scrollRestoration = "auto"
  try { sessionStorage.setItem(store, JSON.stringify(kept)) } catch {}
}
const give = () => {
  let kept = null
  try { kept = JSON.parse(sessionStorage.getItem(store)) } catch {}
  if (!kept) return
  const found = parts(), above = document.getElementById(kept.id)
  box.checked = kept.on
  for (const name of kept.open) if (found.get(name)) found.get(name).parentElement.open = true
  for (const [name, x] of kept.wide) if (found.get(name)) found.get(name).scrollLeft = x
  found.get(kept.focus)?.focus({preventScroll: true})
  history.scrollRestoration = "manual"
  scrollTo(0, above ? scrollY + top_of(above) - kept.top : kept.y)
}
box.closest("p").hidden = false
give()
addEventListener("pagehide", keep)
setInterval(() => {
  if (box.checked && !document.hidden && getSelection().isCollapsed) location.reload()
}, 1000 * box.dataset.seconds)
"""
"""Needs the checkbox of `notice`; everything that it reads from the page is compared, never run or written into it."""
