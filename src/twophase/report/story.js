// The moving picture of the demo's page: two runs round by round, as arrows; the charts below follow with their cursors.
(() => {
  "use strict"
  const figure = document.querySelector(".rounds")
  if (!figure) return
  const runs = JSON.parse(figure.querySelector("script").text), last = Math.max(...runs.map(run => run.rounds.length))
  const [views, button, slider, output] = [".views", "button", "input", "output"].map(name => figure.querySelector(name))
  const space = "http://www.w3.org/2000/svg", calm = matchMedia("(prefers-reduced-motion: reduce)")
  const store = "twophase story " + location.pathname, WIDTH = 300, HEIGHT = 200, ROOM = 14, STEP_MS = 420

  const arrows = ({asked, length, angle, x, y}) => {
    const turn = (angle ?? 0) * Math.PI / 180
    return {ask: [asked, 0], carried: [length * Math.cos(turn), length * Math.sin(turn)], step: [x, y]}
  }
  const ends = runs.flatMap(run => run.rounds.flatMap(line => Object.values(arrows(line))))
  const [low, high] = [0, 1].map(axis => ends.map(end => end[axis])).reduce(
    ([low, high], values) => [[...low, Math.min(0, ...values)], [...high, Math.max(0, ...values)]], [[], []])
  const scale = Math.min((WIDTH - 2 * ROOM) / (high[0] - low[0] || 1), (HEIGHT - 2 * ROOM) / (high[1] - low[1] || 1))
  const place = ([x, y]) => [ROOM + (x - low[0]) * scale, HEIGHT - ROOM - (y - low[1]) * scale]

  const path = end => {
    const [[x0, y0], [x, y]] = [place([0, 0]), place(end)], long = Math.hypot(x - x0, y - y0)
    if (long < 1) return ""
    const head = Math.min(9, long), [dx, dy] = [(x - x0) / long * head, (y - y0) / long * head]
    const barb = side => `M${x},${y}L${x - dx * 0.9 + side * dy * 0.45},${y - dy * 0.9 - side * dx * 0.45}`
    return `M${x0},${y0}L${x},${y}${barb(1)}${barb(-1)}`
  }
  const built = runs.map(run => {
    const [box, title, svg, text] = [["div"], ["h3"], ["svg", space], ["p"]].map(
      ([name, at]) => at ? document.createElementNS(at, name) : document.createElement(name))
    title.textContent = run.name
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`)
    svg.setAttribute("role", "img")
    const lines = Object.fromEntries(["step", "carried", "ask"].map(kind => {
      const line = document.createElementNS(space, "path")
      line.setAttribute("class", kind)
      svg.append(line)
      return [kind, line]
    }))
    box.append(title, svg, text)
    views.append(box)
    return {run, svg, text, lines}
  })
  const number = value => value == null ? "–" : Number(value.toPrecision(3)).toString()

  const show = round => {
    slider.value = round
    output.textContent = `${round} of ${last}`
    for (const {run, svg, text, lines} of built) {
      const line = run.rounds[round - 1]
      for (const kind of Object.keys(lines)) lines[kind].setAttribute("d", line ? path(arrows(line)[kind]) : "")
      const carried = line?.angle == null ? "nothing carried over" : `carried over ${number(line.length)} at ${Math.round(line.angle)}°`
      text.textContent = line ? `asked ${number(line.asked)}, ${carried}; loss ${number(line.loss)}` : "diverged"
      svg.setAttribute("aria-label", `${run.name}, round ${round}: ${text.textContent}`)
    }
    slider.setAttribute("aria-valuetext", `round ${round}. ${built.map(({svg}) => svg.getAttribute("aria-label")).join(". ")}`)
    for (const chart of uPlot.sync("round").plots) chart.setCursor({left: chart.valToPos(round, "x"), top: 10}, true)
  }
  let timer = 0
  const stop = () => { clearInterval(timer); timer = 0; button.textContent = "Play" }
  const play = () => {
    if (Number(slider.value) >= last) show(1)
    button.textContent = "Pause"
    timer = setInterval(() => {
      const next = Number(slider.value) + 1
      show(next)
      if (next >= last) stop()
    }, STEP_MS)
  }
  button.onclick = () => timer ? stop() : play()
  slider.oninput = () => { if (timer) stop(); show(Number(slider.value)) }

  // A page that loads itself again while runs end goes on where it was.
  let before = null
  try { before = JSON.parse(sessionStorage.getItem(store)) } catch {}
  addEventListener("pagehide", () => {
    try { sessionStorage.setItem(store, JSON.stringify({round: Number(slider.value), moves: timer > 0})) } catch {}
  })
  show(Math.min(last, before?.round ?? Number(slider.value)))
  const watch = new IntersectionObserver(entries => {
    if (!entries.some(entry => entry.isIntersecting)) return
    watch.disconnect()
    if (calm.matches || before?.moves === false) return
    if (!before) show(1)
    play()
  }, {threshold: 0.4})
  watch.observe(views.firstElementChild)
})()
