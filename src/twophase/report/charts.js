// Draws the charts of a page with uPlot. Each figure of class plot holds its data as JSON (twophase.report.charts), an
// empty <div> for the picture, and an empty list for the legend. `charts.draw(figure, data)` draws it again.
const charts = (() => {
  "use strict"
  // Strokes of the curves 0 to 7, as in figures/style.py; their colours are --c0 to --c7 of page.css.
  const DASHES = [[], [7, 4], [], [8, 3, 2, 3], [5, 2, 2, 2, 2, 2], [10, 3], [2, 3], [2, 2]]
  const STEPS = Array.from({length: 30}, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3))
  const FONT = "12px system-ui, sans-serif", FEW = 40
  const drawn = new Map()
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
  const make = (name, attributes, ...children) => {
    const element = document.createElement(name)
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value)
    element.append(...children)
    return element
  }
  const text = value => {
    if (value == null) return "–"
    const size = Math.abs(value), whole = Number.isInteger(value) && size < 1e9
    const short = whole || value === 0 || (size >= 1e-3 && size < 1e6)
      ? value.toLocaleString("en", whole ? {} : {maximumSignificantDigits: 4}) : value.toExponential(2)
    return short.replace(/-/g, "−")
  }

  const swatch = (look, mark) => {
    const space = "http://www.w3.org/2000/svg"
    const svg = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path")
    svg.setAttribute("viewBox", "0 0 38 12")
    svg.setAttribute("aria-hidden", "true")
    path.setAttribute("d", mark ? "M19,0V12" : "M1,6H37")
    path.style.stroke = `var(${mark ? "--rule" : `--c${look % 8}`})`
    path.style.strokeDasharray = (mark ? [1, 3] : DASHES[look % 8]).join(" ")
    svg.append(path)
    return svg
  }

  const restarts = data => u => {
    const {left, top, width, height} = u.bbox, ratio = devicePixelRatio
    u.ctx.save()
    u.ctx.beginPath()
    u.ctx.rect(left, top, width, height)
    u.ctx.clip()
    u.ctx.strokeStyle = colour("--rule")
    u.ctx.lineWidth = ratio
    u.ctx.setLineDash([ratio, 3 * ratio])
    u.ctx.beginPath()
    for (const place of data.restarts) {
      u.ctx.moveTo(u.valToPos(place, "x", true), top)
      u.ctx.lineTo(u.valToPos(place, "x", true), top + height)
    }
    u.ctx.stroke()
    u.ctx.restore()
  }
  const axis = (label, more) => ({
    label, labelSize: 18, font: FONT, labelFont: FONT, stroke: () => colour("--soft"),
    grid: {stroke: () => colour("--hair"), width: 1}, ticks: {show: false}, ...more,
  })

  const table = data => [
    ["series", data.x, data.y],
    // A spreadsheet takes a text that begins like this for a formula, and the name may be from a file.
    ...data.series.flatMap(({name, x, y}) => x.map((place, k) => [name.replace(/^(?=[=+\-@\t])/, "'"), place, y[k] ?? ""])),
    ...data.restarts.map(place => ["restart", place, ""]),
  ]
  const csv = data => table(data).map(row => row.map(cell => `"${String(cell).replace(/"/g, '""')}"`).join(",")).join("\n") + "\n"

  const draw = (figure, data) => {
    drawn.get(figure)?.end()
    const box = figure.querySelector(":scope > div"), legend = figure.querySelector(".legend")
    const place = make("li", {class: "place"}), values = data.series.map(() => make("output", {}))
    const live = make("p", {class: "quiet", "aria-live": "polite"})
    // A curve without a point at this place shows its last one before it.
    const value = (u, k) => {
      let index = u.cursor.idx
      while (index > 0 && u.data[k + 1][index] === undefined) index -= 1
      return text(u.data[k + 1][index])
    }
    const show = u => {
      const here = u.cursor.idx != null
      place.textContent = here ? `${data.x} ${text(u.data[0][u.cursor.idx])}` : ""
      values.forEach((output, k) => { output.textContent = here ? value(u, k) : "" })
    }
    const room = data.bulk ? 0.06 * (data.bulk[1] - data.bulk[0]) || 0.5 : 0
    const look = k => data.series[k].look ?? k
    box.replaceChildren()
    const u = new uPlot({
      width: box.clientWidth, height: box.clientHeight, legend: {show: false},
      // The cursors of all charts over the same quantity move together.
      cursor: {sync: {key: data.x}, y: false, drag: {x: true, y: false}},
      scales: {
        x: {time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high]},
        y: {distr: data.log ? 3 : 1, ...(data.bulk && !data.log ? {range: [data.bulk[0] - room, data.bulk[1] + room]} : {})},
      },
      axes: [
        axis(data.x, {incrs: STEPS, size: 26}),
        axis(data.y, {size: (u, texts) => 14 + 7 * Math.max(3, ...(texts ?? []).map(each => each?.length ?? 0))}),
      ],
      series: [{}, ...data.series.map(({x}, k) => ({
        stroke: () => colour(`--c${look(k) % 8}`), width: 1.8, dash: DASHES[look(k) % 8],
        points: {show: x.length < FEW, size: 5, fill: () => colour(`--c${look(k) % 8}`)},
      }))],
      hooks: {drawAxes: [restarts(data)], setCursor: [show]},
    }, data.series.length ? uPlot.join(data.series.map(({x, y}) => [x, y])) : [[0]], box)

    const names = data.series.map(({name}, k) => {
      const button = make("button", {type: "button", "aria-pressed": "true"}, swatch(look(k)), name)
      button.onclick = () => {
        if (data.remove) return data.remove(k)
        const on = button.getAttribute("aria-pressed") !== "true"
        button.setAttribute("aria-pressed", on)
        u.setSeries(k + 1, {show: on})
      }
      return make("li", {}, button, values[k])
    })
    if (data.restarts.length) names.push(make("li", {}, swatch(0, true), "restart"))
    legend.replaceChildren(place, ...names)
    const link = figure.querySelector("a[download]")
    link.hidden = false
    link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(csv(data))}`

    box.tabIndex = 0
    box.setAttribute("role", "application")
    box.setAttribute("aria-roledescription", "chart; arrow keys read its values")
    box.append(live)
    box.onkeydown = event => {
      if (event.altKey || event.ctrlKey || event.metaKey) return  // the browser's: back, the end of the page
      const [first, last] = u.series[0].idxs, now = u.cursor.idx  // of what is in view
      const to = {ArrowRight: (now ?? first - 1) + 1, ArrowLeft: (now ?? last + 1) - 1, Home: first, End: last}[event.key]
      if (to === undefined) return
      event.preventDefault()
      u.setCursor({left: u.valToPos(u.data[0][Math.max(first, Math.min(last, to))], "x"), top: 10})
      live.textContent = `${place.textContent}: ${data.series.map(({name}, k) => `${name} ${value(u, k)}`).join("; ")}`
    }
    box.onblur = () => u.setCursor({left: -10, top: -10})
    const fit = new ResizeObserver(() => u.setSize({width: box.clientWidth, height: box.clientHeight}))
    fit.observe(box)
    drawn.set(figure, {redraw: () => u.redraw(), end: () => { fit.disconnect(); u.destroy() }})
  }

  // A chart of the reader's choice: the page's buttons put curves on it, and its legend takes them out.
  const choose = (figure, data) => {
    const buttons = [...document.querySelectorAll("button[data-curve]")], looks = new Map()
    const update = () => {
      const chosen = [...looks]
      for (const button of buttons) button.setAttribute("aria-pressed", looks.has(Number(button.dataset.curve)))
      const series = chosen.map(([number, look]) => ({...data.series[number], look}))
      draw(figure, {...data, series, remove: place => toggle(chosen[place][0])})
    }
    const toggle = number => {
      const free = DASHES.findIndex((_, look) => ![...looks.values()].includes(look))
      if (!looks.delete(number)) looks.set(number, free < 0 ? looks.size : free)
      update()
    }
    for (const button of buttons) button.onclick = () => toggle(Number(button.dataset.curve))
    data.shown.forEach((number, look) => looks.set(number, look))
    update()
  }

  for (const figure of document.querySelectorAll("figure.plot")) {
    const data = JSON.parse(figure.querySelector("script").text)
    if (data.shown) choose(figure, data)
    else draw(figure, data)
  }
  const redraw = () => drawn.forEach(chart => chart.redraw())
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw)
  const printing = on => () => { document.documentElement.classList.toggle("printed", on); redraw() }
  addEventListener("beforeprint", printing(true))
  addEventListener("afterprint", printing(false))

  // By script and not by a meta element, so that a reader can stop it (WCAG 2.2.1).
  const stop = document.querySelector("button[data-refresh]")
  if (stop) {
    const again = setTimeout(() => location.reload(), 1000 * stop.dataset.refresh)
    stop.onclick = () => { clearTimeout(again); stop.disabled = true }
  }
  return {draw, text}
})()
