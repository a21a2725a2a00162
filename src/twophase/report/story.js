// The moving picture of the demo's page: two runs round by round, as arrows; the charts below follow with their cursors.
;(() => {
  "use strict"
  const figure = document.querySelector(".rounds")
  if (!figure) return
  const runs = JSON.parse(figure.querySelector("script").text), last = Math.max(...runs.map(run => run.rounds.length))
  const [views, button, slider, output] = [".views", "button", "input", "output"].map(name => figure.querySelector(name))
  const space = "http://www.w3.org/2000/svg", store = "twophase story " + location.pathname
  const WIDTH = 300, HEIGHT = 200, ROOM = 14, STEP_MS = 420

  const ends = ({asked, length, angle, x, y}) => {
    const turn = (angle ?? 0) * Math.PI / 180
    return {ask: [asked, 0], carried: [length * Math.cos(turn), length * Math.sin(turn)], step: [x, y]}
  }
  // One scale for both runs and all rounds.
  const all = runs.flatMap(run => run.rounds.flatMap(line => Object.values(ends(line))))
  const [left, right, below, above] = [0, 1].flatMap(k => [Math.min(0, ...all.map(end => end[k])), Math.max(0, ...all.map(end => end[k]))])
  const scale = Math.min((WIDTH - 2 * ROOM) / (right - left || 1), (HEIGHT - 2 * ROOM) / (above - below || 1))
  const place = ([x, y]) => [ROOM + (x - left) * scale, HEIGHT - ROOM - (y - below) * scale]
  const arrow = end => {
    const [[x0, y0], [x, y]] = [place([0, 0]), place(end)], size = Math.hypot(x - x0, y - y0)
    if (size < 1) return ""
    const [dx, dy] = [x - x0, y - y0].map(part => part / size * Math.min(9, size))
    const barb = side => `M${x},${y}L${x - dx * 0.9 + side * dy * 0.45},${y - dy * 0.9 - side * dx * 0.45}`
    return `M${x0},${y0}L${x},${y}${barb(1)}${barb(-1)}`
  }

  const drawings = runs.map(run => {
    const [box, title, text] = ["div", "h3", "p"].map(name => document.createElement(name))
    const [svg, ...lines] = ["svg", "path", "path", "path"].map(name => document.createElementNS(space, name))
    title.textContent = run.name
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`)
    svg.setAttribute("role", "img")
    svg.append(...lines)
    box.append(title, svg, text)
    views.append(box)
    return {run, svg, text, lines}
  })
  const show = round => {
    slider.value = round
    output.textContent = `${round} of ${last}`
    for (const {run, svg, text, lines} of drawings) {
      const now = run.rounds[round - 1]
      for (const [k, kind] of ["step", "carried", "ask"].entries()) {
        lines[k].setAttribute("class", kind)
        lines[k].setAttribute("d", now ? arrow(ends(now)[kind]) : "")
      }
      const carried = now?.angle == null ? "nothing carried over" : `carried over ${charts.text(now.length)} at ${Math.round(now.angle)}°`
      text.textContent = now ? `asked ${charts.text(now.asked)}, ${carried}; loss ${charts.text(now.loss)}` : "diverged"
      svg.setAttribute("aria-label", `${run.name}, round ${round}: ${text.textContent}`)
    }
    slider.setAttribute("aria-valuetext", drawings.map(({svg}) => svg.getAttribute("aria-label")).join(". "))
    for (const chart of uPlot.sync("round").plots) chart.setCursor({left: chart.valToPos(round, "x"), top: 10}, true)
  }

  let timer = 0
  const stop = () => { clearInterval(timer); timer = 0; button.textContent = "Play" }
  const step = () => Number(slider.value) < last ? show(Number(slider.value) + 1) : stop()
  button.onclick = () => {
    if (timer) return stop()
    if (Number(slider.value) >= last) show(1)
    button.textContent = "Pause"
    timer = setInterval(step, STEP_MS)
  }
  slider.oninput = () => { stop(); show(Number(slider.value)) }
  // A page that is loaded again while runs end goes on where it was.
  addEventListener("pagehide", () => sessionStorage.setItem(store, slider.value))
  // The charts are drawn by then, so that their cursors find the place.
  requestAnimationFrame(() => show(Math.min(last, Number(sessionStorage.getItem(store)) || Number(slider.value))))
})()
