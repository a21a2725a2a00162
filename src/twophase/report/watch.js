// Loads a watched page again, and gives the reader's place back. What it reads from the page is only compared.
const box = document.getElementById("again"), store = "twophase report " + location.pathname
const parts = () => {
  const elements = new Map(), count = Object.create(null)
  for (const e of document.querySelectorAll("a, summary, input, button, [tabindex]")) {
    const to = e.getAttribute("href"), words = e.getAttribute("aria-label") ?? e.textContent.replace(/\d+/g, "")
    const name = to && !to.startsWith("data:") ? to : words
    count[name] = (count[name] ?? 0) + 1
    elements.set(name + " " + count[name], e)
  }
  return elements
}
const top_of = e => e.getBoundingClientRect().top
const save = () => {
  const above = [...document.querySelectorAll("h2")].filter(e => top_of(e) <= 0).pop()
  const place = {on: box.checked, y: scrollY, id: above?.id, top: above && top_of(above), open: [], wide: [], pressed: []}
  for (const [name, e] of parts()) {
    if (e.matches("details[open] > summary")) place.open.push(name)
    if (e.matches("[data-curve][aria-pressed=true]")) place.pressed.push(name)
    if (e.scrollLeft) place.wide.push([name, e.scrollLeft])
    if (e === document.activeElement) place.focus = name
  }
  history.scrollRestoration = "auto"
  try { sessionStorage.setItem(store, JSON.stringify(place)) } catch {}
}
const restore = () => {
  let place = null
  try { place = JSON.parse(sessionStorage.getItem(store)) } catch {}
  if (!place) return
  const elements = parts(), above = document.getElementById(place.id)
  box.checked = place.on
  for (const name of place.open) if (elements.get(name)) elements.get(name).parentElement.open = true
  for (const [name, e] of elements) {
    // A curve may have several buttons, and pressing one presses all: look at each anew.
    if (e.matches("[data-curve]") && place.pressed.includes(name) !== (e.getAttribute("aria-pressed") === "true")) e.click()
  }
  for (const [name, x] of place.wide) if (elements.get(name)) elements.get(name).scrollLeft = x
  elements.get(place.focus)?.focus({preventScroll: true})
  history.scrollRestoration = "manual"
  scrollTo(0, above ? scrollY + top_of(above) - place.top : place.y)
}
box.closest("p").hidden = false
restore()
addEventListener("pagehide", save)
setInterval(() => {
  if (box.checked && !document.hidden && getSelection().isCollapsed) location.reload()
}, 1000 * box.dataset.seconds)
